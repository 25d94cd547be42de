"""Communication of other libraries that kernelhub does not call, so that `explain` gives the reason and what to do."""
