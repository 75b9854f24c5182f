"""The mathematics of the memories.  Needs torch only."""

from .basis import GaussianBasis, ridge_operator
from .compressive import CompressiveMemory, CompressiveState
from .continuous import ContinuousMemory, ContinuousState, plan_write
from .contract import Encounter, Goals, LongTermMemory, Plan, as_heads, side_by_side, take_part
from .density import GaussianDensity
from .errors import SettingError
from .infini import InfiniMemory, InfiniState
from .sampling import mix
from .short_term import ShortTermMemory, push
from .state import State, load_state, save_state

__all__ = [
    "CompressiveMemory",
    "CompressiveState",
    "ContinuousMemory",
    "ContinuousState",
    "Encounter",
    "GaussianBasis",
    "GaussianDensity",
    "Goals",
    "InfiniMemory",
    "InfiniState",
    "LongTermMemory",
    "Plan",
    "SettingError",
    "ShortTermMemory",
    "State",
    "as_heads",
    "load_state",
    "mix",
    "plan_write",
    "push",
    "ridge_operator",
    "save_state",
    "side_by_side",
    "take_part",
]
