"""Sequences in a sampling table as a worker has them, for the tests of the sampler."""

import numpy as np
import torch

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import SequenceData
from rayllm.sampling.sampler import sample
from rayllm.sampling.sampling_table import SamplingTable

INF = float("inf")
VOCAB = 24
EOS = [2, 5]
MAX_LEN = 40


class Rig:
    """Sequences in a table of their own, as a worker has them. sequences: (params, seed, prompt, output) each."""

    def __init__(self, sequences, vocab_size=VOCAB, rows=None):
        self.sequences = sequences
        self.rows = np.arange(len(sequences)) if rows is None else np.asarray(rows)
        size = int(self.rows.max(initial=0)) + 1
        self.table = SamplingTable(size, vocab_size, EOS)
        # Stale tokens everywhere: only the known ones may count.
        self.token_table = torch.full((size, MAX_LEN), 1, dtype=torch.int32)
        for row, (params, seed, prompt, output) in zip(self.rows.tolist(), sequences, strict=True):
            tokens = prompt + output
            self.table.set(SequenceData(row, tokens, len(prompt), 0, [], params, seed))
            self.token_table[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.positions = np.array([len(prompt) + len(output) for _, _, prompt, output in sequences], dtype=np.int64)
        self.table.check_integrity()

    def batch(self, order=None):
        order = np.arange(len(self.sequences)) if order is None else np.asarray(order, dtype=np.int64)
        return self.table.batch(self.rows[order], self.positions[order], "cpu")

    def sample(self, logits, order=None):
        """Tokens of the sequences `order` (all), whose logits are logits[order]."""
        rows = logits if order is None else logits[list(order)]
        return sample(rows, self.batch(order), self.token_table)

    def tokens(self, logits, order=None):
        return self.sample(logits, order).token_ids.tolist()


def plain(seed=0, prompt=(1, 1), output=(), **params):
    return SamplingParams(max_tokens=100, **params), seed, list(prompt), list(output)


MIXED = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 20},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"min_p": 0.05, "presence_penalty": 1.0},
    {"temperature": 0.0, "frequency_penalty": 0.5},
    {"temperature": 3.0, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 1.3, "logit_bias": {17: 5.0}, "min_tokens": 9},
    {"temperature": 0.01, "top_p": 0.5, "logprobs": 0},
]


def mixed_rig(count, vocab_size):
    generator = np.random.default_rng(0)
    sequences = []
    for i in range(count):
        length = int(generator.integers(1, 15))
        prompt, output = (
            generator.integers(0, vocab_size, n).tolist() for n in (length, int(generator.integers(0, 20)))
        )
        params = SamplingParams(max_tokens=100, **MIXED[i % len(MIXED)])
        sequences.append((params, int(generator.integers(0, 2**63)), prompt, output))
    return Rig(sequences, vocab_size)
