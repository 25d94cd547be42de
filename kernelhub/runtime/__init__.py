"""WHEN work is done: memory that outlives a call, operators of other projects' libraries."""
