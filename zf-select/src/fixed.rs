//! Columns from a file.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use schemars::JsonSchema;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use zf_core::registry::{Build, BuildContext, nearest, setting};
use zf_core::slots;
use zf_core::stage::{Axis, Candidates, Selector};
use zf_core::{Error, Result};

use crate::base::{Base, from_base};
use crate::{Interval, checks};

/// Settings of the selector `fixed`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FixedConfig {
    /// A JSON file of columns by the names of weights, ascending, from 0: {"layer.weight": [0, 7, 9]}. Weights that are not
    /// in it have none.
    #[schemars(extend("format" = "path"))]
    pub path: PathBuf,
    /// Whether a column is an input feature or an output feature of the weight.
    #[serde(default)]
    pub axis: Axis,
    /// When to choose again, which changes nothing here but is counted and traced as with other selectors.
    #[serde(default)]
    pub every: Interval,
}

impl FixedConfig {
    /// The selector. The file is read once.
    ///
    /// # Errors
    /// A file that cannot be read, is no such JSON, names a weight twice, or lists columns that are not ascending.
    pub fn selector(self, cx: &BuildContext) -> anyhow::Result<Fixed> {
        let path = cx.path(&self.path);
        let refuse = |what: String| setting("path", format!("{}: {what}", path.display()));
        let text = std::fs::read_to_string(&path).map_err(|error| refuse(error.to_string()))?;
        let columns: Columns = serde_json::from_str(&text)
            .map_err(|error| refuse(format!("expected columns by name, {{\"layer.weight\": [0, 7, 9]}}: {error}")))?;
        for (name, columns) in &columns.0 {
            if let Some(pair) = columns.windows(2).find(|pair| pair[0] >= pair[1]) {
                return Err(refuse(format!(
                    "the columns of `{name}` must ascend without repetition, found {} after {}",
                    pair[1], pair[0]
                )));
            }
        }
        Ok(Fixed { columns: Arc::new(columns), path: path.into(), base: Base::new(self.axis, self.every)? })
    }
}

impl Build<slots::Select> for FixedConfig {
    fn build(self, cx: &BuildContext) -> anyhow::Result<Box<dyn Selector>> {
        Ok(Box::new(self.selector(cx)?))
    }
}

zf_core::register!(
    slots::Select,
    "fixed",
    FixedConfig,
    "the columns that a JSON file lists by the names of weights",
    "path = \"columns.json\""
);

/// The columns that a file lists; none for a weight that is not in it.
#[derive(Debug, Clone)]
pub struct Fixed {
    columns: Arc<Columns>,
    path: Arc<Path>,
    base: Base,
}

impl Selector for Fixed {
    from_base!();

    fn check(&self, weights: &BTreeMap<&str, usize>) -> Result<()> {
        for name in self.columns.0.keys() {
            let Some(&columns) = weights.get(name.as_str()) else {
                let advice = match nearest(name, weights.keys().copied()) {
                    Some(near) => format!("did you mean `{near}`?"),
                    None => format!("those are: {}", weights.keys().copied().collect::<Vec<_>>().join(", ")),
                };
                return Err(self.refuse(&format!("`{name}` is no weight whose columns are chosen; {advice}")));
            };
            self.listed(name, columns)?;
        }
        Ok(())
    }

    fn choose(&mut self, weight: &Candidates<'_>) -> Result<Vec<u32>> {
        checks::columns(weight)?;
        Ok(self.listed(weight.name, weight.columns)?.to_vec())
    }
}

impl Fixed {
    /// The columns that the file lists for a weight that has `columns`.
    fn listed(&self, name: &str, columns: usize) -> Result<&[u32]> {
        let listed = self.columns.0.get(name).map_or(&[][..], Vec::as_slice);
        match listed.last() {
            Some(&last) if last as usize >= columns => Err(self.refuse(&format!(
                "column {last} of `{name}`, which has columns 0 to {}; select.axis decides which dimension they count",
                columns - 1
            ))),
            _ => Ok(listed),
        }
    }

    fn refuse(&self, what: &str) -> Error {
        Error::Input(format!("{}: {what}", self.path.display()))
    }
}

/// The file. Unlike a map's own form it refuses a name that comes twice, of which one would be without effect.
#[derive(Debug)]
struct Columns(BTreeMap<String, Vec<u32>>);

impl<'de> Deserialize<'de> for Columns {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Reader;

        impl<'de> Visitor<'de> for Reader {
            type Value = Columns;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of lists")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Columns, A::Error> {
                let mut all = BTreeMap::new();
                while let Some((name, columns)) = map.next_entry::<String, Vec<u32>>()? {
                    if let Some((name, _)) = all.get_key_value(&name) {
                        return Err(A::Error::custom(format!("`{name}` comes twice")));
                    }
                    all.insert(name, columns);
                }
                Ok(Columns(all))
            }
        }

        deserializer.deserialize_map(Reader)
    }
}
