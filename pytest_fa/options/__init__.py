"""The command line and the ini file, read once into a frozen `Options`.  No other layer reads pytest's config."""
