"""The calls of users: put tokenring into a config of torchtitan."""

from __future__ import annotations

from typing import Any, TypeVar

from tokenring.errors import ConfigurationError
from tokenring.integrations.torchtitan.inputs import Setup, give_back, install
from tokenring.integrations.torchtitan.models import replace_attention
from tokenring.integrations.torchtitan.versions import check_version

Config = TypeVar("Config")


def use_tokenring(
    config: Config, *, layout: Any = "auto", any_model: bool = False, any_version: bool = False, **options: Any
) -> Config:
    """Change a Trainer.Config of torchtitan so that its model attends by tokenring where it is context parallel.

    config: as a function among torchtitan's configs returns it. It is changed in place, and returned: the inner
    attention of all layers, and training.disable_cuda_graphs, which becomes True.
    layout, options: of the ContextParallel that is made of torchtitan's mesh "cp": schedule, topology, kernel, ...
    any_model, any_version: take models and versions of torchtitan that were not compared with one process.

    parallelism.context_parallel_load_balancer has no effect then: layout says which tokens a rank holds.

    Raises UnsupportedError for models and versions that were not run, and in training for what would be wrong;
    ConfigurationError for another config; BackendUnavailable without torchtitan.
    """
    check_version(any_version)
    prepare_model(_model_of(config, "use_tokenring"), layout=layout, any_model=any_model, **options)
    config.training.disable_cuda_graphs = True  # type: ignore[attr-defined]
    return config


def stop_tokenring(config: Any) -> None:
    """Give a config back the inner attention that it had before `use_tokenring`; others stay as they are.

    Models that were built of it, and of its copies, train no more. Once no config of the process is changed,
    torchtitan's Trainer and Validator have their own functions again. training.disable_cuda_graphs stays True.

    Raises ConfigurationError for what is no Trainer.Config, and for copies of a config that was given back.
    """
    give_back(_model_of(config, "stop_tokenring"))


def _model_of(config: Any, call: str) -> Any:
    """Return the model's config in a Trainer.Config of torchtitan. Raises ConfigurationError for what is none."""
    spec = getattr(config, "model_spec", None)
    if spec is None or not hasattr(config, "training"):
        raise ConfigurationError(
            f"{call} got a {type(config).__qualname__}: give a Trainer.Config of torchtitan with its model_spec"
        )
    return spec.model


def prepare_model(model: Any, *, layout: Any = "auto", any_model: bool = False, **options: Any) -> None:
    """Change the config of a model of torchtitan, and the place where its batches are cut."""
    replace_attention(model, Setup({"layout": layout, **options}), any_model)
    install()
