"""The files that `tokenring topology` writes, with --measure too."""

SUFFIXES = {"save": (".json",), "svg": (".svg",), "html": (".html", ".htm")}  # of each option, how a name may end
