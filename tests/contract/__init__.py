"""One contract per op; a backend's test subclasses it and names its kernel."""
