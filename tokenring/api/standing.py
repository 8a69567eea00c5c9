"""What stands for this process: shown by what users call, copied as itself, never pickled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, NoReturn

from tokenring.errors import NotPicklable


class Shown(type):
    """Shows in help() and dir() what users call, without what the rest of the package does."""

    def __dir__(cls) -> Iterable[str]:
        hidden = {name for each in cls.__mro__ for name in vars(each).get("_internal", ())}
        return [name for name in super().__dir__() if name not in hidden]


class Standing(metaclass=Shown):
    """A thing of this process alone. _internal: the names in it that are the package's."""

    _internal: ClassVar[frozenset[str]] = frozenset()

    def __dir__(self) -> Iterable[str]:
        return [name for name in super().__dir__() if name not in self._internal]

    def __copy__(self) -> Standing:
        return self

    def __deepcopy__(self, memo: object) -> Standing:
        """Itself: copies of a model, as for averaged weights, compute with the same ranks and buffers."""
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotPicklable(
            f"a {type(self).__name__} cannot be pickled or saved: it stands for the group, the connections and the "
            f"memory of this process. Save model.state_dict() instead of the model, or take the context out before, "
            f"and set one made anew after loading"
        )
