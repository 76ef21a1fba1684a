"""One module per revision, in order. Must not hold Python logic beyond running its two SQL texts."""
