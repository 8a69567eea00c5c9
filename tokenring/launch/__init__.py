"""Processes of ranks: started, followed, ended, and the groups that they form."""
