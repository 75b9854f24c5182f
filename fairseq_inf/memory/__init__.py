"""The mathematics of the memories.  Needs torch only."""

from .basis import GaussianBasis, ridge_operator
from .compressive import CompressiveMemory, CompressiveState
from .continuous import ContinuousMemory
from .contract import (
    Correction,
    Encounter,
    Goals,
    LongTermMemory,
    Move,
    Plan,
    as_heads,
    side_by_side,
    take_part,
)
from .density import CellDensity, GaussianDensity, Weights
from .errors import SettingError
from .file import check_writable, load_state, save_state
from .gibbs import GibbsDensity, GibbsMemory
from .infini import InfiniMemory, InfiniState
from .points import PointsMemory, SlotsOfSignal
from .sampling import mix
from .schedule import Constant, Logarithmic, Schedule, Uniform
from .short_term import Leaving, ShortTermMemory, pick, push, rate
from .signal import ContinuousState, SignalMemory, plan_write
from .state import State

__all__ = [
    "CellDensity",
    "CompressiveMemory",
    "CompressiveState",
    "Constant",
    "ContinuousMemory",
    "ContinuousState",
    "Correction",
    "Encounter",
    "GaussianBasis",
    "GaussianDensity",
    "GibbsDensity",
    "GibbsMemory",
    "Goals",
    "InfiniMemory",
    "InfiniState",
    "Leaving",
    "Logarithmic",
    "LongTermMemory",
    "Move",
    "Plan",
    "PointsMemory",
    "Schedule",
    "SettingError",
    "ShortTermMemory",
    "SignalMemory",
    "SlotsOfSignal",
    "State",
    "Uniform",
    "Weights",
    "as_heads",
    "check_writable",
    "load_state",
    "mix",
    "pick",
    "plan_write",
    "push",
    "rate",
    "ridge_operator",
    "save_state",
    "side_by_side",
    "take_part",
]
