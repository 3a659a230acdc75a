"""The part of vLLM's offline API that engine_driver.py uses, with its signatures."""

import sys
from types import SimpleNamespace

from fake_engine import note


class SamplingParams:
    def __init__(self, n=1, temperature=1.0, top_p=1.0, ignore_eos=False, max_tokens=16):
        self.temperature, self.ignore_eos, self.max_tokens = temperature, ignore_eos, max_tokens


class LLM:
    def __init__(
        self,
        model,
        *,
        skip_tokenizer_init=False,
        tensor_parallel_size=1,
        max_model_len=None,
        load_format="auto",
        enforce_eager=False,
    ):
        note(engine={"model": model, "skip": skip_tokenizer_init, "max_model_len": max_model_len})
        if load_format == "broken":
            sys.exit("no kernel image is available")
        self.longest = max_model_len or 10**9

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True):
        batch = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            assert set(prompt) == {"prompt_token_ids"}
            assert params.ignore_eos
            assert params.temperature == 0.6
            batch.append((prompt["prompt_token_ids"], params.max_tokens))
        note(prompts=[ids for ids, _ in batch], max_tokens=[most for _, most in batch])
        return [
            SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=[7] * min(most, self.longest - len(ids)))], num_cached_tokens=0
            )
            for ids, most in batch
        ]
