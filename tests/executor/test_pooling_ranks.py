"""Embeddings on two ranks, over Ray: what one rank gives."""

from __future__ import annotations

import torch
from support.model_factory import make_model

from rayllm import LLM

PROMPTS = [[3], [(7 * i) % 250 for i in range(50)], [(11 * i + 5) % 250 for i in range(31)]]


POOLINGS = ("last", "mean")


def test_two_ranks_embed_as_one_does(tmp_path, ray_cluster):
    folder, found = make_model(tmp_path, "qwen3"), []
    for ranks in (1, 2):
        options = {"tensor_parallel_size": ranks, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 40}
        with LLM(folder, device="cpu", skip_tokenizer_init=True, **options) as llm:
            outputs = [llm.embed(PROMPTS, pooling, use_tqdm=False) for pooling in POOLINGS]
            found.append(torch.tensor([[list(output.embedding) for output in each] for each in outputs]))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[0].norm(dim=2), torch.ones(len(POOLINGS), len(PROMPTS)))
