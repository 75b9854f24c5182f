"""The ∞-former on fairseq.

fairseq's `--user-dir` imports `tasks` and `models` of this package; `fairseq_inf.memory` stands
on torch alone.
"""

__version__ = "0.3.0"
