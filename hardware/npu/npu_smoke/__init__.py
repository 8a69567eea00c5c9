"""ci/npu-smoke: settles on NPUs, in minutes, what no emulation can, and writes one file to send back.

`command` starts ranks (`team`), which do tasks (`links`, `traffic`, `costs`, `operators`, `kernel`, `shapes`,
`schedules`, `training`; `tasks` names them) and say what they find (`rank`); `unknowns` is the table of what is to be
settled, and makes a verdict of each (`verdicts`). docs/ascend.md shows the same table.
"""
