"""The part of SGLang's offline API that engine_driver.py uses, with its signatures."""

from fake_engine import note


class Engine:
    def __init__(self, *, model_path, skip_tokenizer_init=False, tp_size=1, context_length=None, load_format="auto"):
        note(engine={"model": model_path, "skip": skip_tokenizer_init, "max_model_len": context_length})

    def generate(self, prompt=None, sampling_params=None, input_ids=None):
        assert prompt is None
        for params in sampling_params:
            assert params.keys() == {"temperature", "ignore_eos", "max_new_tokens"}
        lengths = [params["max_new_tokens"] for params in sampling_params]
        note(prompts=input_ids, max_tokens=lengths)
        return [
            {"output_ids": [7] * length, "meta_info": {"completion_tokens": length, "cached_tokens": 5}}
            for length in lengths
        ]
