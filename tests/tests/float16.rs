//! float16 with a dynamic loss scale.
