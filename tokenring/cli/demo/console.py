"""The console of the demo, with the progress of training."""

from __future__ import annotations

from tokenring.display import console

BAR_WIDTH = 30
PLAIN_LINES = 8  # of progress, where there is no terminal


class DemoConsole(console.Console):
    """A console that shows how far training is."""

    def progress(self, done: int, total: int, loss: float, tokens_per_second: float, seconds_left: float) -> None:
        """Show a bar on a terminal, and some lines elsewhere."""
        if self.live:
            self.status("   " + progress_bar(done, total, loss, tokens_per_second, seconds_left))
        elif is_landmark(done, total):
            self.complain("   " + progress_line(done, total, loss, tokens_per_second))


def progress_bar(done: int, total: int, loss: float, tokens_per_second: float, seconds_left: float) -> str:
    """Return a bar: ━━━━━━━━━━────────── 12/24   loss 2.913   3,204 tokens/s   0:34 left."""
    filled = BAR_WIDTH * done // total
    bar = "━" * filled + "─" * (BAR_WIDTH - filled)
    minutes, seconds = divmod(round(seconds_left), 60)
    counted = f"{done:{len(str(total))}}/{total}"
    return f"{bar} {counted}   loss {loss:.3f}   {tokens_per_second:,.0f} tokens/s   {minutes}:{seconds:02} left"


def progress_line(done: int, total: int, loss: float, tokens_per_second: float) -> str:
    """Return a line: step 12/24   loss 2.913   3,204 tokens/s."""
    return f"step {done:{len(str(total))}}/{total}   loss {loss:.3f}   {tokens_per_second:,.0f} tokens/s"


def is_landmark(done: int, total: int) -> bool:
    """Tell whether a step gets a line of its own: the first, the last, and some at equal distances."""
    return done in (1, total) or done * PLAIN_LINES // total > (done - 1) * PLAIN_LINES // total
