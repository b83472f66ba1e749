"""The paper: capabilities, advantages, importance ratios and the loss, as pure functions on arrays. Read this first."""
