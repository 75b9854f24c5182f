"""The mathematics of the memories.  Needs torch only."""

from fairseq_inf.errors import SettingError

from .basis import GaussianBasis, ridge_operator
from .compressive import CompressiveMemory, CompressiveState
from .continuous import ContinuousMemory
from .contract import Encounter, LongTermMemory, Move, Plan, as_heads, side_by_side, take_part
from .density import CellDensity, GaussianDensity, Weights
from .file import load_state, not_finite, save_state
from .gaussian import GaussianReader
from .gibbs import GibbsDensity, GibbsReader
from .infini import InfiniMemory, InfiniState
from .places import Places
from .reader import Reader
from .sampling import mix
from .schedule import SCHEDULES, Constant, Logarithmic, Schedule, Uniform
from .selective import POLICIES, PRECISIONS, SelectiveMemory, SelectiveState
from .short_term import ShortTermMemory, Window, push
from .signal import ContinuousState, Signal, plan_write
from .state import COUNTER, State

__all__ = [
    "COUNTER",
    "CellDensity",
    "CompressiveMemory",
    "CompressiveState",
    "Constant",
    "ContinuousMemory",
    "ContinuousState",
    "Encounter",
    "GaussianBasis",
    "GaussianDensity",
    "GaussianReader",
    "GibbsDensity",
    "GibbsReader",
    "InfiniMemory",
    "InfiniState",
    "Logarithmic",
    "LongTermMemory",
    "Move",
    "POLICIES",
    "PRECISIONS",
    "Places",
    "Plan",
    "Reader",
    "SCHEDULES",
    "Schedule",
    "SelectiveMemory",
    "SelectiveState",
    "SettingError",
    "ShortTermMemory",
    "Signal",
    "State",
    "Uniform",
    "Weights",
    "Window",
    "as_heads",
    "load_state",
    "mix",
    "not_finite",
    "plan_write",
    "push",
    "ridge_operator",
    "save_state",
    "side_by_side",
    "take_part",
]
