"""`forge watch`: a page over the folders of runs."""
