//! Ranks in processes of their own: a test starts its own executable again.
