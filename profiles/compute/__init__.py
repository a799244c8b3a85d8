"""Two models over documents: any layers over any KV, step by step, in a journal.

models      two checkpoints ─► models
layered     any span of a model's layers, over any KV
passes      one document's KV and E
mixtures    questions where each layer reads a source of its own
examination how close the answers stay to full prefill's
room        batches that fit into the memory
study       one document, kept in the journal
training    every block by KL; judging: any plan by the metric
"""

from profiles.compute.examination import FIRST_TOKENS, Answerer, Examination, Tokens
from profiles.compute.fitting import NUM_FITTED, fit_maps
from profiles.compute.journal import Entry, Journal, Timed, temporary_journal
from profiles.compute.judging import NUM_SHOWN, baselines, first_of_each_task, judge, num_steps
from profiles.compute.judging import SPLIT as HELD_OUT
from profiles.compute.layered import KV, LayeredModel, check_layers
from profiles.compute.mixtures import Asked, Mixture, decode
from profiles.compute.models import ModelSource, Pair, load_model, load_pair, load_tokenizer
from profiles.compute.passes import DocumentPasses
from profiles.compute.room import Bounds, Room, Sizes, bounds_of, longest_suffix, make_room
from profiles.compute.study import FIRST_NEW, REFERENCES, THEIRS, Bench, block_mixture
from profiles.compute.training import SPLIT, places_swept, sweep, sweep_corrected

__all__ = [
    "FIRST_NEW",
    "FIRST_TOKENS",
    "HELD_OUT",
    "KV",
    "NUM_FITTED",
    "NUM_SHOWN",
    "REFERENCES",
    "SPLIT",
    "THEIRS",
    "Answerer",
    "Asked",
    "Bench",
    "Bounds",
    "DocumentPasses",
    "Entry",
    "Examination",
    "Journal",
    "LayeredModel",
    "Mixture",
    "ModelSource",
    "Pair",
    "Room",
    "Sizes",
    "Timed",
    "Tokens",
    "baselines",
    "block_mixture",
    "bounds_of",
    "check_layers",
    "decode",
    "first_of_each_task",
    "fit_maps",
    "judge",
    "load_model",
    "load_pair",
    "load_tokenizer",
    "longest_suffix",
    "make_room",
    "num_steps",
    "places_swept",
    "sweep",
    "sweep_corrected",
    "temporary_journal",
]
