"""What names of schedules say, which fit, and what is offered."""

from __future__ import annotations

import pickle
import re
from importlib import import_module

import pytest
from families import points

import tokenring as tr
from tokenring.errors import ConfigurationError
from tokenring.schedule.families import misfit, parse, variants
from tokenring.schedule.families.family import LaterFunction
from tokenring.schedule.families.registry import FAMILIES
from tokenring.sequence.layout import make_layout
from tokenring.sequence.workload import Workload


class TestNames:
    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("rings", "unknown schedule 'rings'; choose one of ring, tokenring, "),
            ("usp", "schedule 'usp': usp/U takes one number, none is given; e.g. usp/2"),
            ("usp/2x2", "schedule 'usp/2x2': usp/U takes one number, 2 are given; e.g. usp/2"),
            ("tiles/2", "schedule 'tiles/2': tiles/AxB takes the numbers A and B, 1 is given; e.g. tiles/2x4"),
            ("ring/2", "schedule 'ring/2': ring takes no parameters, 1 is given; e.g. ring"),
            ("relay", "schedule 'relay': relay/L takes one number, none is given; e.g. relay/4"),
            ("usp/0", "unknown schedule 'usp/0'; "),
            ("usp/2/lately", "schedule 'usp/2/lately': there is no option 'lately'; use late, keep, regather, piecesN"),
            ("mesh-kv/2", "schedule 'mesh-kv/2': mesh-kv/AxBx... takes 2 or more numbers A and B, 1 is given"),
        ],
    )
    def test_what_no_name_is(self, name: str, says: str) -> None:
        with pytest.raises(ConfigurationError, match=f"^{re.escape(says)}"):
            parse(name)

    @pytest.mark.parametrize(
        ("name", "ranks", "says"),
        [
            ("usp/3", 8, "schedule 'usp/3' on 8 ranks: 3 ranks a group do not divide 8; choose one of usp/2, usp/4"),
            ("tiles/3x2", 8, "schedule 'tiles/3x2' on 8 ranks: 3 × 2 is not 8; choose one of tiles/2x4, tiles/4x2"),
            ("sub-sharded/2x2x3", 8, "schedule 'sub-sharded/2x2x3' on 8 ranks: 2 × 2 × 3 is 12, not 8; choose one of "),
            ("relay/3", 4, "schedule 'relay/3' on 4 ranks: 3 ranks a node do not divide 4; choose one of relay/2"),
            ("usp/3", 5, "schedule 'usp/3' on 5 ranks: 3 ranks a group do not divide 5; none of this family fits"),
        ],
    )
    def test_what_does_not_fit_the_ranks(self, name: str, ranks: int, says: str) -> None:
        with pytest.raises(ConfigurationError, match=f"^{re.escape(says)}"):
            parse(name).make(ranks)
        assert str(misfit(name, ranks)).startswith(says)

    def test_what_does_not_fit_the_workload(self) -> None:
        """Heads, chunks; and each with one that fits."""
        six, whole = Workload(1, 512, 512, 6, 6, 32), make_layout("zigzag", 8, 512)
        assert misfit("ulysses", 8, Workload(1, 512, 512, 8, 2, 32)) is None
        assert misfit("sub-sharded/2x2x2", 8, six, whole, whole) is None
        assert misfit("ulysses", 8, six) == (
            "schedule 'ulysses': 6 query heads over 6 kv heads do not split into 8 equal head groups; "
            "choose one with other head groups, as sub-sharded/UxAxB, or with none"
        )
        assert misfit("multi-ring", 8, None, whole, whole) == (
            "schedule 'multi-ring': 7 pieces do not divide chunks of 32 tokens (layout 'zigzag' of 512); "
            "use fewer pieces or another length"
        )
        assert misfit("bidirectional", 8, pieces=3) == "schedule 'bidirectional' in 3 pieces: use a multiple of 2"
        assert misfit("nothing", 8) is not None

    def test_all_that_is_offered_fits(self) -> None:
        for point in points([*range(1, 10), 16, 24], ("",)):
            size = Workload(1, point.ranks, point.ranks, *point.heads, 8)
            assert misfit(point.name, point.ranks, size) is None, point
            assert parse(point.name).family.name == point.family

    def test_what_is_offered(self) -> None:
        one_node = set(variants(8, Workload(1, 8, 8, 6, 6, 8)))
        assert {"ring", "usp/2", "tiles/2x4", "sub-sharded/2x2x2", "mixed", "multi-ring", "mesh-kv/2x4"} <= one_node
        assert not {"ulysses", "usp/4", "relay/4", "double-ring/4"} & one_node
        two_nodes = set(variants(8, Workload(1, 8, 8, 8, 8, 8), 4))
        assert {"ulysses", "usp/4", "relay/4", "relay-q/4", "double-ring/4", "case-iii/4", "reduced/4"} <= two_nodes
        assert not [name for name in variants(8, Workload(1, 8, 8, 8, 2, 8)) if name.startswith("mixed")]
        assert "mixed/2x2" in variants(8, Workload(1, 8, 8, 8, 4, 8))
        assert "ulysses/2" in variants(4, Workload(1, 8, 8, 8, 8, 8))
        assert "ulysses/2" not in variants(4, Workload(1, 8, 8, 8, 4, 8))  # kv heads would go twice

    @pytest.mark.parametrize(
        ("heads", "offered"),
        [(6, [6]), (30, [15, 30]), (38, [38]), (5, [5]), (4, []), (1, []), (16, [])],  # 15: 4 heads at most, as 30
    )
    def test_uneven_heads_that_are_offered(self, heads: int, offered: list[int]) -> None:
        names = [name for name in variants(8, Workload(1, 8, 8, heads, heads, 8)) if name.startswith("uneven")]
        assert names == [f"uneven/{groups}" for groups in offered]

    def test_contexts_take_them(self) -> None:
        for name in ("ring", "auto", "auto:usp,ring", "auto:usp/2,ulysses", "mixed", "multi-ring/late"):
            tr.ContextParallel(schedule=name)
        with pytest.raises(ConfigurationError, match=r"schedule 'usp/2' on 1 ranks: 2 ranks a group do not divide 1"):
            tr.ContextParallel(schedule="usp/2")
        with pytest.raises(ConfigurationError, match="usp/U takes one number"):
            tr.ContextParallel(schedule="usp")

    def test_a_workload_without_the_heads_is_refused_where_it_is_planned(self) -> None:
        from tokenring.schedule.names import named_schedule

        whole = make_layout("zigzag", 4, 64)
        with pytest.raises(ConfigurationError, match="6 query heads over 6 kv heads do not split into 4 equal"):
            named_schedule("ulysses", Workload(1, 64, 64, 6, 6, 8), whole, whole, tr.Full())
        assert named_schedule("ulysses", Workload(1, 64, 64, 4, 2, 8), whole, whole, tr.Full()).name == "ulysses"


def test_functions_that_are_imported_later_exist() -> None:
    """A name that is misspelt in the table would show only in a call; and families can be pickled."""
    later = [
        (family, part)
        for family in FAMILIES.values()
        for part in (family.scheme, family.choices, family.cut, family.small)
        if isinstance(part, LaterFunction)
    ]
    assert len(later) > 20
    for family, part in later:
        assert callable(getattr(import_module(f"tokenring.schedule.families.{part.module}"), part.name)), part
        assert pickle.loads(pickle.dumps(family)) == family
