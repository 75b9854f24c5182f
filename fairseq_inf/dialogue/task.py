"""Answer in a conversation about a document that was read once, before it began."""

from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
from fairseq.tasks import register_task

from fairseq_inf.data import StreamDataset
from fairseq_inf.tasks.lines import LinesConfig
from fairseq_inf.tasks.sequences import SequencesTask

from .turns import SPEAKERS, find_said


@dataclass
class DialogueConfig(LinesConfig):
    document_loss: bool = field(
        default=False, metadata={"help": "the words of the document are targets, too"}
    )


@register_task("dialogue", dataclass=DialogueConfig)
class DialogueTask(SequencesTask):
    """A conversation has a memory of its own.  Targets are the words and ends of turns."""

    name, needs = "dialogue", SPEAKERS[0]
    made_by = "bash examples/dialogue/prepare.sh"

    def asked(self, dataset: StreamDataset, document: int) -> np.ndarray:
        return find_said(dataset, document, self.cfg.document_loss)

    def prompts(self, dataset: StreamDataset) -> NoReturn:
        raise ValueError(
            "fairseq-generate is not for --task dialogue: use fairseq-inf-dialogue, which answers "
            "every turn of the true conversation"
        )
