"""What is the vllm engine's own, with real vLLM; test_engine_contract.py has what all engines promise."""

import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from producers.engines.base import EngineSettings
from producers.engines.vllm.arguments import read_names
from producers.engines.vllm.boot import engine_arguments
from schemas.errors import ConfigError
from tests.support.models.families import make_family
from tests.support.models.published_versions import PROBE, publish_versions
from tests.support.producers.vllm_checks import find_engine_cores, is_alive

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def test_engine_arguments_reach_vllm_as_they_are(folders: dict[int, Path]):
    from vllm import AsyncEngineArgs

    parallel = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}
    settings = EngineSettings(str(folders[0]), "bfloat16", 512, 64, args={**parallel, "gpu_memory_utilization": 0.8})
    found = AsyncEngineArgs(**engine_arguments(folders[0], settings, on_cpu=False, devices=8))
    assert {name: getattr(found, name) for name in parallel} == parallel
    assert (found.gpu_memory_utilization, found.dtype, found.max_model_len, found.max_num_seqs) == (
        0.8,
        "bfloat16",
        512,
        64,
    )
    assert found.logprobs_mode == "processed_logprobs"
    assert not found.enforce_eager, "what only a CPU needs is left out"
    wrong = replace(settings, args={"tensor_paralel_size": 2})
    with pytest.raises(ConfigError, match="did you mean tensor_parallel_size"):
        engine_arguments(folders[0], wrong, on_cpu=False, devices=8)


def test_the_names_of_arguments_that_are_read_from_vllms_source_are_all_there_are():
    import vllm
    from vllm import AsyncEngineArgs

    source = Path(vllm.__path__[0]) / "engine" / "arg_utils.py"
    assert sorted(read_names(source)) == sorted(field.name for field in fields(AsyncEngineArgs))


OWNER = """
import asyncio, json, sys
from pathlib import Path
from producers.engines.base import EngineSettings
from producers.engines.vllm.engine import VllmEngine
from schemas.errors import InfraError
from schemas.messages import FileSource, Sampling

async def main():
    model, probe, *versions = sys.argv[1:]
    engine = VllmEngine(EngineSettings(model, "float32", 512, 32))
    await engine.start()
    found = [await engine.logprobs(json.loads(probe))]
    for version, file in enumerate(versions, start=1):
        await engine.load(FileSource(Path(file)), version)
        found.append(await engine.logprobs(json.loads(probe)))
    print(json.dumps([list(map(float, one)) for one in found]), flush=True)
    running = asyncio.create_task(engine.generate([5, 6, 7], Sampling(max_tokens=500), n=8))
    await engine.generate([5, 6], Sampling(max_tokens=3))
    for work in (engine._swap(Path("gone.safetensors"), 3), running, engine.generate([5], Sampling())):
        try:
            print("no error:", await work, flush=True)
        except InfraError as error:
            print("InfraError:", error, flush=True)
    print("ready", flush=True)
    await asyncio.sleep(300)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_an_engine_follows_a_mixture_and_half_loaded_never_samples_again_and_dies_with_its_owner(tmp_path: Path):
    """Experts' tensors differ in memory from their folder; test_mixtures.py has other families."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    folder = make_family(tmp_path / "model", "qwen3_moe")
    expected, files = publish_versions(folder, tmp_path)
    command = [sys.executable, str(script), str(folder), json.dumps(PROBE), *map(str, files)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        found = next(line for line in owner.stdout if line.startswith("[["))
        np.testing.assert_allclose(json.loads(found), expected, atol=1e-4)
        lines = []
        for line in owner.stdout:
            if line.startswith("ready"):
                break
            lines.append(line)
        assert [line.partition(":")[0] for line in lines] == ["InfraError"] * 3
        assert "weights are undefined" in lines[1]
        cores = find_engine_cores(owner.pid)
        assert cores
    finally:
        owner.kill()
        owner.wait(timeout=30)
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in cores):
        assert time.monotonic() < deadline, f"engine core {cores} outlived its owner"
        time.sleep(0.1)
