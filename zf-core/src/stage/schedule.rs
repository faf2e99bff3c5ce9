//! The learning rate over time.

/// A learning-rate schedule: a pure function of the number of updates made.
pub trait Schedule: Send + Sync {
    /// The factor on the base rate for update number `step` (from 0; skipped steps do not count) of a run of `total`
    /// updates. At least 0.
    fn factor(&self, step: u64, total: u64) -> f64;
}
