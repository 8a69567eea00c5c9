"""Test what of tokenring.integrations.torchtitan needs no torchtitan: batches, where they are cut, versions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import Here, RankPools

import tokenring as tr
from tokenring.errors import BackendUnavailable, ConfigurationError, TokenRingError, UnsupportedError
from tokenring.integrations.torchtitan import cut_batch, inputs, stop_tokenring, use_tokenring
from tokenring.integrations.torchtitan.batches import TitanBatch
from tokenring.integrations.torchtitan.inputs import CALLERS, NAME, Setup, install
from tokenring.integrations.torchtitan.versions import check_version, pip_requirement

LENGTH = 24


def batch_of(*rows: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Rows of these documents, by length."""
    inputs = torch.arange(len(rows) * LENGTH).view(len(rows), LENGTH)
    places = torch.stack([torch.cat([torch.arange(each) for each in row]) for row in rows])
    return inputs, inputs + 1, {"positions": places}


def cut_on_ranks(here: Here, rows: tuple[tuple[int, ...], ...], windows: tuple[int | None, ...]) -> Any:
    cp = here.cp(layout="auto")
    inputs, labels, extra = cut_batch(*batch_of(*rows), cp, windows=windows)
    batch = extra["attention_masks"]
    assert isinstance(batch, TitanBatch) and batch.cp is cp
    return inputs, labels, extra["positions"], [batch.mask_of(each) for each in windows]


def test_each_token_keeps_its_label_and_position(ranks: RankPools) -> None:
    """Rows that are packed alike stay rows; others become one, whose documents end where rows do."""
    for rows, shape, ends in (
        (((10, 14), (10, 14)), [2, LENGTH // 2], (0, 10, 24)),
        (((10, 14), (24,)), [1, LENGTH], (0, 10, 24, 48)),
    ):
        inputs, _, extra = batch_of(*rows)
        place_of = dict(zip(inputs.flatten().tolist(), extra["positions"].flatten().tolist(), strict=True))
        seen: list[int] = []
        for tokens, labels, places, masks in ranks(2)(cut_on_ranks, rows, (None, 5)):
            assert list(tokens.shape) == shape and torch.equal(labels, tokens + 1)
            assert places.flatten().tolist() == [place_of[each] for each in tokens.flatten().tolist()]
            assert masks == [tr.Causal() & tr.Documents(ends), tr.SlidingWindow(4) & tr.Causal() & tr.Documents(ends)]
            seen += tokens.flatten().tolist()
        assert sorted(seen) == inputs.flatten().tolist()


def test_one_document_is_causal_alone() -> None:
    cp = tr.ContextParallel("self")
    assert cut_batch(*batch_of((LENGTH,)), cp)[2]["attention_masks"].mask_of(None) == tr.Causal()


def refused_on_ranks(here: Here, what: str) -> str:
    inputs, labels, extra = batch_of((10, 14))
    if here.rank == 1:
        if what == "tokens":
            inputs = inputs + 7
        elif what == "another tensor":
            extra["pixels"] = torch.zeros(1, LENGTH)
        elif what == "no positions":
            del extra["positions"]
        elif what == "masks":
            extra["attention_masks"] = object()
        elif what == "three axes":
            extra["positions"] = extra["positions"].expand(3, 1, -1)
    try:
        cut_batch(inputs, labels, extra, here.cp())
    except TokenRingError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(("what", "said"), [
    ("tokens", "the ranks disagree, so the call was not made. inputs"),
    ("another tensor", "pixels [1, 24] in a batch is not supported"),
    ("no positions", "a batch came with no positions"), ("masks", "a batch came with attention_masks of its own"),
    ("three axes", "positions are [3, 1, 24], inputs [1, 24]"), ("nothing", "not refused"),
])  # fmt: skip
def test_what_one_rank_refuses_all_hear(what: str, said: str, ranks: RankPools) -> None:
    for text in ranks(2)(refused_on_ranks, what):
        assert said in text


def test_a_window_that_was_not_foreseen_is_refused() -> None:
    batch = cut_batch(*batch_of((LENGTH,)), tr.ContextParallel("self"))[2]["attention_masks"]
    with pytest.raises(ConfigurationError, match="sliding window of 9 tokens, and the batch was cut for"):
        batch.mask_of(9)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_without_a_token_is_refused(window: int) -> None:
    with pytest.raises(ConfigurationError, match=f"a sliding window of {window} tokens: a token sees itself"):
        cut_batch(*batch_of((LENGTH,)), tr.ContextParallel("self"), windows=(None, window))
    found = cut_batch(*batch_of((LENGTH,)), tr.ContextParallel("self"), windows=iter((None, 1)))[2]["attention_masks"]
    assert found.mask_of(1) == tr.Causal() & tr.SlidingWindow(0)


# ---------- torchtitan's own modules


def preparing(module: ModuleType) -> type:
    """A class whose method looks the function up as those of torchtitan do: trainer.py, line 751, validate.py, 197."""

    class Caller:
        model_config: Any = None

        def post_dataloading_process(self, input_dict: Any, labels: Any, *model_parts: Any) -> Any:
            extra = {name: x for name, x in input_dict.items() if name != "input"}
            return getattr(module, NAME)(input_dict["input"], labels, extra, "self", "cpu", "headtail", None)

    return Caller


@pytest.fixture
def titan(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules of torchtitan 0.3.0 that look prepare_context_parallel_input up by its name: trainer.py, line 46,
    components/validate.py, line 22; and its version."""
    made = {name: ModuleType(name) for name in ("torchtitan", "torchtitan.components", *CALLERS)}
    for name, kind in CALLERS.items():
        setattr(made[name], NAME, lambda *given, **more: ("torchtitan's own", *given))
        setattr(made[name], kind, preparing(made[name]))
    made["torchtitan"].__version__ = "0.3.0"  # type: ignore[attr-defined]
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield made


def config_with(**inner: Any) -> Any:
    """A model's config, as far as it is read."""
    attention = SimpleNamespace(inner_attention=SimpleNamespace(**inner))
    return SimpleNamespace(layers=[SimpleNamespace(attention=attention)])


def prepared_by(titan: dict[str, ModuleType], name: str, config: Any) -> Any:
    caller = getattr(titan[name], CALLERS[name])()
    inputs, labels, extra = batch_of((10, 14))
    if name == "torchtitan.trainer":
        caller.model_config = config
        return caller.post_dataloading_process({"input": inputs, **extra}, labels)
    parts = [SimpleNamespace(config=config)]
    return caller.post_dataloading_process({"input": inputs, **extra}, labels, model_parts=parts)


def test_each_model_has_its_own_options_and_others_torchtitans(titan: dict[str, ModuleType]) -> None:
    first, second = Setup({"schedule": "ring"}, frozenset({7})), Setup({}, frozenset({None, 5}))
    configs = [config_with(tokenring_setup=each.number()) for each in (first, second)]
    install()
    install()
    for name in CALLERS:
        for config, schedule, windows in zip(configs, ("ring", "auto"), ({7}, {None, 5}), strict=True):
            part, _, found = prepared_by(titan, name, config)
            assert torch.equal(part, batch_of((10, 14))[0]) and set(found["attention_masks"].masks) == windows
            assert found["attention_masks"].cp.schedule == schedule
        assert prepared_by(titan, name, config_with())[0] == "torchtitan's own"  # as its models without masks
        assert getattr(titan[name], NAME)(*batch_of((10, 14)), "self")[0] == "torchtitan's own"
        with pytest.raises(ConfigurationError, match="which another process put there"):
            prepared_by(titan, name, config_with(tokenring_setup=10**9))


def standing(titan: dict[str, ModuleType]) -> list[Any]:
    """Return what stands where torchtitan cuts batches."""
    kinds = [(titan[name], getattr(titan[name], kind)) for name, kind in CALLERS.items()]
    return [each for module, kind in kinds for each in (getattr(module, NAME), kind.post_dataloading_process)]


def test_torchtitan_gets_its_own_back(titan: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped config at once, and the process with the last of them."""
    monkeypatch.setattr(inputs, "_setups", {})
    own, configs, setups = standing(titan), [], [Setup({}), Setup({})]
    for setup in setups:
        model = config_with(tokenring_setup=setup.number())
        setup.replaced = ["its own"] * len(model.layers)
        configs.append(SimpleNamespace(model_spec=SimpleNamespace(model=model), training=None))
    install()
    ours, cp = standing(titan), setups[0].context("self")
    for config, left in zip(configs, (ours, own), strict=True):
        stop_tokenring(config)
        assert config.model_spec.model.layers[0].attention.inner_attention == "its own" and standing(titan) == left
        stop_tokenring(config)
    assert cp.closed and not any(each in own for each in ours)
    install()
    titan["torchtitan.trainer"].Trainer.post_dataloading_process = another = lambda *_: None
    inputs._uninstall()
    assert standing(titan) == [own[0], another, *own[2:]]


def test_what_others_wrapped_around_ours_stays(titan: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrappers have the attributes of what they wrap."""
    monkeypatch.setattr(inputs, "_setups", {})
    install()
    for name in CALLERS:
        ours = getattr(titan[name], NAME)
        setattr(titan[name], NAME, wraps(ours)(lambda *given, ours=ours: ours(*given)))
    stood = standing(titan)
    install()
    assert standing(titan) == stood
    inputs._uninstall()
    assert [getattr(titan[name], NAME) for name in CALLERS] == stood[::2]
    assert not any(each in stood for each in standing(titan)[1::2])


def test_contexts_that_are_closed_are_made_again() -> None:
    setup = Setup({})
    first = setup.context("self")
    assert setup.context("self") is first
    first.close()
    assert setup.context("self") is not first and not setup.context("self").closed


@pytest.mark.parametrize(("version", "said"), [
    ("0.2.2", "torchtitan 0.2.2 is not one that tokenring was run with: install torchtitan>=0.3,<0.4"),
    ("0.4.0", "torchtitan 0.4.0 is not one"), ("nightly", "torchtitan nightly is not one"),
])  # fmt: skip
def test_other_versions_are_refused(version: str, said: str, titan: dict[str, ModuleType]) -> None:
    titan["torchtitan"].__version__ = version  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError) as caught:
        use_tokenring(object())
    assert said in str(caught.value)
    assert check_version(any_version=True) == version


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(BackendUnavailable) as caught:
        use_tokenring(object())
    assert f"pip install 'torchtitan{pip_requirement()}'" in str(caught.value)


def test_another_config_is_refused(titan: dict[str, ModuleType]) -> None:
    for call in (use_tokenring, stop_tokenring):
        with pytest.raises(ConfigurationError, match=rf"{call.__name__} got a object: give a Trainer\.Config"):
            call(object())
