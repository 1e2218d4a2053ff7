"""`--fa-watch`: after every save of a selected variant's files, build, check and time the variant again."""
