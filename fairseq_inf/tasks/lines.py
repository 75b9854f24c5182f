"""What some tasks share: a line is a document, and only some of its tokens are asked."""

from dataclasses import dataclass, field
from typing import Any, NoReturn

from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum

from .long_sequence_lm import LongSequenceLMConfig, LongSequenceLMTask


@dataclass
class LinesConfig(LongSequenceLMConfig):
    stream_layout: ChoiceEnum(["documents"]) = field(
        default="documents", metadata={"help": "each line is read from an empty memory"}
    )


class LinesTask(LongSequenceLMTask):
    name: str
    needs: str  # a word that its data has
    made_by: str  # the command that makes it

    def __init__(self, cfg: Any, dictionary: Dictionary) -> None:
        super().__init__(cfg, dictionary)
        if cfg.document_separator != dictionary.eos_word:
            raise ValueError(
                f"--document-separator {cfg.document_separator} is not for {self.name}: a line is "
                "a document, leave it out"
            )
        if dictionary.index(self.needs) == dictionary.unk():
            raise ValueError(
                f"the dictionary of {cfg.data} has no {self.needs}: make the data with "
                f"{self.made_by}"
            )

    def eval_lm_dataloader(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            f"fairseq-eval-lm is not for --task {self.name}, which asks for some tokens only: "
            "use fairseq-validate --valid-subset"
        )
