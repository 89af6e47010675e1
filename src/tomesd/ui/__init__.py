"""The page in the browser: images with and without merging, side by side. Needs the extra `ui`."""
