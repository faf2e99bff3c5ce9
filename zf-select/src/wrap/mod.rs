//! Selectors around another selector. Those of a run file are listed from the inside out: the last one is asked first and
//! sees the scores as they are.

/// The methods of a [`zf_core::stage::Selector`] that a decorator with a field `inner` passes on: those given.
macro_rules! pass_on {
    ($($method:ident),*) => {
        $(pass_on!(@ $method);)*
    };
    (@ axis) => {
        fn axis(&self) -> zf_core::stage::Axis {
            self.inner.axis()
        }
    };
    (@ every) => {
        fn every(&self) -> zf_core::stage::Every {
            self.inner.every()
        }
    };
    (@ score) => {
        fn score(&self) -> Option<&dyn zf_core::stage::Score> {
            self.inner.score()
        }
    };
    (@ check) => {
        fn check(&self, weights: &std::collections::BTreeMap<&str, usize>) -> zf_core::Result<()> {
            self.inner.check(weights)
        }
    };
    (@ choose) => {
        fn choose(&mut self, weight: &zf_core::stage::Candidates<'_>) -> zf_core::Result<Vec<u32>> {
            self.inner.choose(weight)
        }
    };
    (@ state) => {
        fn state(&self) -> serde_json::Value {
            self.inner.state()
        }

        fn restore(&mut self, state: &serde_json::Value) -> zf_core::Result<()> {
            self.inner.restore(state)
        }
    };
}

mod ema;
mod every;
mod hysteresis;

use zf_core::stage::Selector;

pub use ema::{Ema, EmaConfig};
pub use every::{EveryConfig, EveryN};
pub use hysteresis::{Hysteresis, HysteresisConfig};

/// Refuses a decorator of scores around a selector that has none.
fn needs_scores(inner: &dyn Selector) -> anyhow::Result<()> {
    anyhow::ensure!(
        inner.score().is_some(),
        "changes scores, and the selector within uses none; remove it, or choose a selector with scores such as \"topk\""
    );
    Ok(())
}
