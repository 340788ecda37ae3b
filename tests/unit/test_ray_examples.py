"""The manifest for KubeRay and the Dockerfile, as far as they can be checked without a cluster."""

import importlib.util
import re
import shlex
import sys
import tomllib
from pathlib import Path, PurePosixPath

import kubernetes_validate
import pytest
import yaml
from dockerfile_parse import DockerfileParser
from ray.serve.schema import ServeDeploySchema

from vllm_medusa import __version__

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# Of the schemas that kubernetes-validate has; nothing in the manifest is newer.
KUBERNETES = "1.30"


@pytest.fixture(scope="module")
def constraints():
    """The pinned versions."""
    lines = (ROOT / "ci" / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


@pytest.fixture(scope="module")
def service():
    return yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())


@pytest.fixture(scope="module")
def application(service):
    """The one application of the manifest, as Ray Serve reads it."""
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    (application,) = config.applications
    return application


@pytest.fixture(scope="module")
def example():
    """examples/ray_serve.py as a module."""
    spec = importlib.util.spec_from_file_location("ray_serve", EXAMPLES / "ray_serve.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def pods(service):
    """The pod templates by what they are for."""
    cluster = service["spec"]["rayClusterConfig"]
    groups = {"head": cluster["headGroupSpec"]}
    groups |= {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {name: group["template"] for name, group in groups.items()}


def test_pods_fit_the_schema_of_kubernetes(service):
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    for name, template in pods(service).items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, **template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_a_wrong_field_would_be_noticed(service):
    template = pods(service)["head"]
    container = template["spec"]["containers"][0] | {"imagee": "typo"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "head"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            pod | {"spec": template["spec"] | {"containers": [container]}}, KUBERNETES, strict=True
        )


def test_the_application_is_the_example(application, example):
    module, _, name = application.import_path.partition(":")
    assert (EXAMPLES / f"{module}.py").is_file()
    deployment = getattr(example, name)(example.Arguments(**application.args))
    assert deployment._bound_deployment.name == "OpenAIServer"
    with pytest.raises(ValueError, match="replicass"):
        example.Arguments(**application.args, replicass=1)


def test_options_are_those_of_vllm(application):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(application.args["options"])
    assert args.served_model_name == ["llm"]


def test_replicas_fit_the_pods(service, application):
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    args = application.args
    assert args["cpus"] == float(container["resources"]["limits"]["cpu"])
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert args["min_replicas"] == group["minReplicas"]
    assert args["max_replicas"] == group["maxReplicas"]
    mounts = [PurePosixPath(mount["mountPath"]) for mount in container["volumeMounts"]]
    for path in (args["model"], args["heads"]):
        assert set(PurePosixPath(path).parents) & set(mounts)


def test_versions_are_those_of_the_project(service, constraints):
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == constraints["ray"]
    for template in pods(service).values():
        for container in template["spec"]["containers"]:
            assert container["image"] == f"vllm-medusa:{__version__}"
    text = (EXAMPLES / "Dockerfile").read_text()
    assert f"-t vllm-medusa:{__version__} " in text
    assert f"ARG RAY_VERSION={constraints['ray']}\n" in text


@pytest.fixture(scope="module")
def instructions():
    parser = DockerfileParser(fileobj=(EXAMPLES / "Dockerfile").open("r+b"))
    return [(step["instruction"], step["value"]) for step in parser.structure]


def test_the_image_is_built_from_files_of_the_repository(instructions):
    copied = []
    for instruction, value in instructions:
        if instruction == "COPY":
            *sources, _ = [part for part in shlex.split(value) if not part.startswith("--")]
            copied += sources
    assert "examples/ray_serve.py" in copied
    assert [source for source in copied if not (ROOT / source).exists()] == []
    # All that hatchling needs to build the package.
    assert {"pyproject.toml", "README.md", "LICENSE", "patches", "vllm_medusa"} <= set(copied)


def test_the_commands_of_the_image_exist(instructions):
    commands = " ".join(value for instruction, value in instructions if instruction == "RUN")
    modules = re.findall(r"python -m ([\w.]+)", commands)
    assert len(modules) == 2
    assert all(importlib.util.find_spec(module) for module in modules)
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", commands)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_the_image_does_not_end_as_root(instructions):
    assert instructions[0][0] in ("COMMENT", "ARG")
    assert [value for instruction, value in instructions if instruction == "USER"][-1] == "ray"
