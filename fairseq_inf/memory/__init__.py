"""The mathematics of the memories.  Needs torch only."""

from .basis import GaussianBasis, ridge_operator
from .compressive import CompressionPlan, CompressiveMemory, CompressiveState
from .continuous import ContinuousMemory, ContinuousState, plan_write
from .density import GaussianDensity
from .file import check_writable, load_state, save_state
from .sampling import mix
from .short_term import push, split_recent
from .state import State

__all__ = [
    "CompressionPlan",
    "CompressiveMemory",
    "CompressiveState",
    "ContinuousMemory",
    "ContinuousState",
    "GaussianBasis",
    "GaussianDensity",
    "State",
    "check_writable",
    "load_state",
    "mix",
    "plan_write",
    "push",
    "ridge_operator",
    "save_state",
    "split_recent",
]
