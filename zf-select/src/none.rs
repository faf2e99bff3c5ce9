//! No column.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::Result;
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::{Axis, Candidates, Selector};

use crate::base::{Base, from_base};
use crate::{Interval, checks};

/// Settings of the selector `none`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NoneConfig {
    /// Whether a column is an input feature or an output feature of the weight.
    pub axis: Axis,
    /// When to choose again, which changes nothing here but is counted and traced as with other selectors.
    pub every: Interval,
}

impl NoneConfig {
    /// The selector.
    ///
    /// # Errors
    /// An interval outside its range.
    pub fn selector(self) -> anyhow::Result<NoColumns> {
        Ok(NoColumns { base: Base::new(self.axis, self.every)? })
    }
}

impl Build<slots::Select> for NoneConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Box<dyn Selector>> {
        Ok(Box::new(self.selector()?))
    }
}

zf_core::register!(
    slots::Select,
    "none",
    NoneConfig,
    "no column of any weight: all are left to the host",
    "every = 16"
);

/// No column of any weight: all two-dimensional weights are updated by the host, once a window.
#[derive(Debug, Clone)]
pub struct NoColumns {
    base: Base,
}

impl Selector for NoColumns {
    from_base!();

    fn choose(&mut self, weight: &Candidates<'_>) -> Result<Vec<u32>> {
        checks::columns(weight)?;
        Ok(Vec::new())
    }
}
