//! A selector with another interval.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::registry::{Build, BuildContext, Wrap};
use zf_core::slots;
use zf_core::stage::{Every, Selector};

use crate::checks::require;

/// Settings of the decorator `every`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EveryConfig {
    /// After how many updates columns are chosen again, at least 1.
    pub updates: u64,
}

impl EveryConfig {
    /// Puts the decorator around `inner`.
    ///
    /// # Errors
    /// A number of 0.
    pub fn around(self, inner: Box<dyn Selector>) -> anyhow::Result<EveryN> {
        self.check()?;
        Ok(EveryN { inner, updates: self.updates })
    }

    fn check(&self) -> anyhow::Result<()> {
        require(0 < self.updates, "updates", "at least 1", self.updates)
    }
}

impl Build<slots::SelectWrap> for EveryConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Wrap<slots::Select>> {
        self.check()?;
        Ok(Box::new(move |inner| Ok(Box::new(self.around(inner)?))))
    }
}

zf_core::register!(
    slots::SelectWrap,
    "every",
    EveryConfig,
    "chooses again after a number of updates, whatever the selector says",
    "[select]\nwrap = [{ kind = \"every\", updates = 16 }]"
);

/// Another selector, asked again after a number of updates instead of when it says.
#[derive(Debug)]
pub struct EveryN {
    inner: Box<dyn Selector>,
    updates: u64,
}

impl Selector for EveryN {
    pass_on!(axis, check, score, choose, state);

    fn clone_box(&self) -> Box<dyn Selector> {
        Box::new(Self { inner: self.inner.clone_box(), updates: self.updates })
    }

    fn every(&self) -> Every {
        Every::Updates(self.updates)
    }
}
