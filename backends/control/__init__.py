"""The processes of a group, beside the data: finding, hearing and watching each other."""
