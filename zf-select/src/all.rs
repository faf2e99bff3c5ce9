//! Every column.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::Result;
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::{Axis, Candidates, Selector};

use crate::base::{Base, from_base};
use crate::{Interval, checks};

/// Settings of the selector `all`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AllConfig {
    /// Whether a column is an input feature or an output feature of the weight.
    pub axis: Axis,
    /// When to choose again, which changes nothing here but is counted and traced as with other selectors.
    pub every: Interval,
}

impl AllConfig {
    /// The selector.
    ///
    /// # Errors
    /// An interval outside its range.
    pub fn selector(self) -> anyhow::Result<AllColumns> {
        Ok(AllColumns { base: Base::new(self.axis, self.every)? })
    }
}

impl Build<slots::Select> for AllConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Box<dyn Selector>> {
        Ok(Box::new(self.selector()?))
    }
}

zf_core::register!(
    slots::Select,
    "all",
    AllConfig,
    "every column of every weight: as training without an offload",
    "every = 16"
);

/// Every column of every weight: all updates are the device's, at once, and training equals that without an offload.
#[derive(Debug, Clone)]
pub struct AllColumns {
    base: Base,
}

impl Selector for AllColumns {
    from_base!();

    fn choose(&mut self, weight: &Candidates<'_>) -> Result<Vec<u32>> {
        Ok((0..checks::columns(weight)?).collect())
    }
}
