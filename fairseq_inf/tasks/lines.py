"""What tasks on made-up data share: a line is a document, and only some of its tokens are asked."""

from dataclasses import dataclass, field

from fairseq.dataclass import ChoiceEnum

from .long_sequence_lm import LongSequenceLMConfig, LongSequenceLMTask


@dataclass
class LinesConfig(LongSequenceLMConfig):
    stream_layout: ChoiceEnum(["documents"]) = field(
        default="documents", metadata={"help": "each line is read from an empty memory"}
    )


class LinesTask(LongSequenceLMTask):
    name, needs = None, None  # of the task, and a word that its data has

    def __init__(self, cfg, dictionary):
        super().__init__(cfg, dictionary)
        if cfg.document_separator != dictionary.eos_word:
            raise ValueError(
                f"--document-separator {cfg.document_separator} is not for {self.name}: a line is "
                "a document, leave it out"
            )
        if dictionary.index(self.needs) == dictionary.unk():
            raise ValueError(
                f"the dictionary of {cfg.data} has no {self.needs}: make the data with "
                f"python -m fairseq_inf.data.{self.name}"
            )

    def eval_lm_dataloader(self, dataset, **kwargs):
        raise ValueError(
            f"fairseq-eval-lm is not for --task {self.name}, which asks for some tokens only: "
            "use fairseq-validate --valid-subset"
        )
