//! What all selectors of this crate have: axis, interval, and perhaps a score.

use std::sync::Arc;

use zf_core::registry::{BuildContext, Choice};
use zf_core::slots;
use zf_core::stage::{Axis, Every, Score};

use crate::Interval;

/// Axis, interval and score.
#[derive(Debug, Clone)]
pub(crate) struct Base {
    pub(crate) axis: Axis,
    pub(crate) every: Every,
    pub(crate) score: Option<Arc<dyn Score>>,
}

impl Base {
    /// Of a selector without scores.
    pub(crate) fn new(axis: Axis, every: Interval) -> anyhow::Result<Self> {
        Ok(Self { axis, every: every.every()?, score: None })
    }

    /// Of a selector whose setting `score` is this.
    pub(crate) fn scored(
        axis: Axis,
        every: Interval,
        score: &Choice<slots::Score>,
        cx: &BuildContext,
    ) -> anyhow::Result<Self> {
        Ok(Self { score: Some(score.build("score", cx)?), ..Self::new(axis, every)? })
    }
}

/// The methods of a [`zf_core::stage::Selector`] that follow from its field `base`, for one that is `Clone`.
macro_rules! from_base {
    () => {
        fn clone_box(&self) -> Box<dyn zf_core::stage::Selector> {
            Box::new(self.clone())
        }

        fn axis(&self) -> zf_core::stage::Axis {
            self.base.axis
        }

        fn every(&self) -> zf_core::stage::Every {
            self.base.every
        }

        fn score(&self) -> Option<&dyn zf_core::stage::Score> {
            self.base.score.as_deref()
        }
    };
}

pub(crate) use from_base;
