"""Golden selection tables: a review of their diff shows what a change reroutes."""
