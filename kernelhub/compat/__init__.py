"""Names that other projects know: kernelhub behind the interfaces they already call."""
