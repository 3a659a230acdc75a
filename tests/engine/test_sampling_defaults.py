"""generation_config.json of a checkpoint as the sampling defaults of requests, over HTTP and in `LLM`."""

from __future__ import annotations

import asyncio
import json
import shutil

import httpx
import pytest
from support.app import FakeState
from support.engine import fake_core

from rayllm.api.sampling_params import SamplingParams
from rayllm.config.options import BUNDLED_MODEL
from rayllm.engine.async_engine import AsyncEngine
from rayllm.llm import LLM
from rayllm.serve.cluster.launch import describe_start
from rayllm.serve.http.app import create_app

TOLD = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 9}
DEFAULTS = {name: value for name, value in TOLD.items() if name != "max_new_tokens"} | {"max_tokens": 9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """The bundled model with TOLD."""
    folder = shutil.copytree(BUNDLED_MODEL, tmp_path_factory.mktemp("model"), dirs_exist_ok=True)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | TOLD))
    return str(folder)


def params_over_http(folder: str, *bodies: dict, **options: object) -> list[SamplingParams]:
    """What the workers are told of completions that the app gets one after the other."""
    core, executor = fake_core(model=folder, **options)

    async def main() -> None:
        state, engine = FakeState(), AsyncEngine(core, None)
        state.fake = engine  # type: ignore[assignment]
        transport = httpx.ASGITransport(app=create_app(state, None, ()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for body in bodies:
                answer = await client.post("/v1/completions", json={"prompt": [1, 2, 3]} | body)
                assert answer.status_code == 200, answer.text
        await engine.close()

    asyncio.run(main())
    return [data.params for plan in executor.plans for data in plan.new]


def test_requests_over_http_are_sampled_as_the_checkpoint_says(folder):
    silent, partly, explicit, beams = params_over_http(
        folder,
        {},
        {"temperature": 1.5, "max_tokens": 3},
        {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "max_tokens": 2},
        {"use_beam_search": True, "best_of": 2},
    )[:4]
    assert silent == SamplingParams(**DEFAULTS)
    assert partly == SamplingParams(**DEFAULTS | {"temperature": 1.5, "max_tokens": 3})
    assert explicit == SamplingParams(temperature=0, max_tokens=2)
    assert beams == SamplingParams(use_beam_search=True, best_of=2, max_tokens=9)


def test_generation_config_none_leaves_them_out(folder):
    assert params_over_http(folder, {}, generation_config="none") == [SamplingParams()]


def test_the_start_says_them(folder):
    core, _ = fake_core(model=folder)
    line = "sampling temperature 0.6, top_p 0.9, top_k 20, min_p 0.05, repetition_penalty 1.1, max_tokens 9 by default"
    assert f"{line} (generation_config.json)" in describe_start(core.info)


def test_llm_takes_them_where_it_gets_no_parameters(folder):
    with LLM(folder, device="cpu", max_num_seqs=2, num_gpu_blocks_override=16) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(**DEFAULTS)
        (silent,) = llm.generate("The for statement", use_tqdm=False)
        (explicit,) = llm.generate("The for statement", SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert len(silent.outputs[0].token_ids) <= 9
    assert len(explicit.outputs[0].token_ids) == 12
