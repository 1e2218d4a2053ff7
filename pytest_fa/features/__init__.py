"""The features, one folder each; a folder can be taken out together with those that need it."""
