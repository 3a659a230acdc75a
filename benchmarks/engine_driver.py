"""Runs workloads on one engine, by the Python that it is installed for; compare.py starts it. Needs that engine alone.

    PYTHON engine_driver.py ENGINE RESULT [WORK]

ENGINE is rayllm, vllm or sglang. RESULT is a JSON file to be written: `versions`, and the `folder` that the engine is
in. With WORK, also `load_seconds`, and `workloads`: for each the `seconds` of each measured run and the most
`cached_tokens` of a run (prompt tokens found in the prefix cache, null if the engine does not tell).

WORK is a JSON file: `options` of the engine's constructor; `temperature`; `warmup`, the number of runs of each workload
that are not measured; `workloads`, lists of runs, each with `prompts` (token ids) and `max_tokens` (a number a prompt).
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import time

SOFTWARE = ["torch", "triton", "transformers"]  # whose versions matter beside the engine's


def describe(engine):
    """Versions and place of an installed engine, which is not imported."""
    spec = importlib.util.find_spec(engine)
    if spec is None:
        sys.exit(f"{engine} is not installed for {sys.executable}")
    versions = {}
    for name in [engine, *SOFTWARE]:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {"versions": versions, "folder": os.path.dirname(os.path.dirname(spec.origin))}


def start_llm(module, options):
    """A function that completes a batch with an engine that has vLLM's offline API, as rayllm does.

    It returns seconds, the number of tokens of each output, and the prompt tokens from the prefix cache or None.
    """
    llm = module.LLM(**options)

    def generate(prompts, max_tokens, temperature):
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [module.SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n) for n in max_tokens]
        started = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        cached = [output.num_cached_tokens for output in outputs]
        return (
            seconds,
            [len(output.outputs[0].token_ids) for output in outputs],
            None if None in cached else sum(cached),
        )

    return generate


def start_sglang(module, options):
    """The same as `start_llm` for SGLang."""
    engine = module.Engine(**options)

    def generate(prompts, max_tokens, temperature):
        params = [{"temperature": temperature, "ignore_eos": True, "max_new_tokens": n} for n in max_tokens]
        started = time.perf_counter()
        outputs = engine.generate(input_ids=prompts, sampling_params=params)
        seconds = time.perf_counter() - started
        infos = [output["meta_info"] for output in outputs]
        return seconds, [info["completion_tokens"] for info in infos], sum(info["cached_tokens"] for info in infos)

    return generate


def run(engine, work):
    """What RESULT has with WORK."""
    started = time.perf_counter()
    module = importlib.import_module(engine)
    generate = (start_sglang if engine == "sglang" else start_llm)(module, work["options"])
    result = {"load_seconds": time.perf_counter() - started, "workloads": []}
    for number, runs in enumerate(work["workloads"], 1):
        seconds, cached = [], []
        for batch in runs:
            print(f"workload {number} of {len(work['workloads'])}, run {len(seconds) + 1} of {len(runs)}", flush=True)
            elapsed, made, found = generate(batch["prompts"], batch["max_tokens"], work["temperature"])
            if made != batch["max_tokens"]:
                sys.exit("the model's context is too short for this workload: outputs ended early")
            seconds.append(elapsed)
            cached.append(found)
        most = None if None in cached else max(cached)
        result["workloads"].append({"seconds": seconds[work["warmup"] :], "cached_tokens": most})
    return result


def main():
    engine, path, *work = sys.argv[1:]
    result = describe(engine)
    if work:
        with open(work[0]) as file:
            result.update(run(engine, json.load(file)))
    with open(path, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":  # engines start processes that import this file again
    main()
