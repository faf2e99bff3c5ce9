//! The resolved run as text and as rows.

use schemars::{Schema, schema_for};
use serde::Serialize;

use super::Run;
use super::sections::{DeviceSection, HostSection, LogSection, ReduceSection, RunSection};
use crate::layout::DType;
use crate::registry::{Description, Step, WRAP_LIST, schema};
use crate::slots;

/// The order of sections in a resolved run.
const ORDER: &[&str] = &[
    "model",
    "data",
    "run",
    "device",
    "host",
    "transport",
    "partition",
    "reduce",
    "select",
    "offload",
    "optim",
    "schedule",
    "log",
];

/// One key of a resolved run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The dotted key: `partition.stage`.
    pub key: String,
    /// The value as TOML.
    pub value: String,
    /// Where it comes from: `recipes/demo.toml:12`, `preset zero-1`, `-o run.steps=10`, `default`.
    pub source: String,
    /// What it does, from the documentation of its settings type.
    pub help: String,
}

impl Run {
    /// The whole run with all defaults, as one run file that needs no other. Reading it gives this run again.
    pub fn resolved_toml(&self) -> String {
        let mut text = format!("# The resolved run `{}`: every setting, defaults included.\n", self.name());
        if let Some(preset) = &self.preset {
            text.push_str(&format!("# Preset: {preset}.\n"));
        }
        for (section, table) in self.resolved() {
            let one = toml::Table::from_iter([(section, toml::Value::Table(table))]);
            // A table of plain values has a text form; the key's type in `toml` cannot say so.
            let body = toml::to_string(&one).unwrap_or_default();
            text.push('\n');
            text.push_str(&body);
        }
        text
    }

    /// The resolved run as a table: sections with all their settings.
    pub fn resolved(&self) -> Vec<(String, toml::Table)> {
        let mut sections: Vec<(String, toml::Table)> = vec![
            ("run".into(), table(&self.run)),
            ("device".into(), table(&self.device)),
            ("host".into(), table(&self.host)),
            ("reduce".into(), table(&self.reduce)),
            ("log".into(), table(&self.log)),
        ];
        // Where it has no effect it is refused, so a resolved run must not hold it.
        if self.run.dtype != DType::Float16 {
            sections[0].1.remove("loss_scale");
        }
        for (slot, entry) in &self.stages {
            let given = self.root.get(slot.name).and_then(|node| node.table());
            let mut settings = given.map(|tree| tree.plain()).unwrap_or_default();
            settings.remove(slot.key);
            // Decorators stay as they are given.
            let decorators = slot.wrap.and_then(|_| settings.remove(WRAP_LIST));
            fill_defaults(entry, &mut settings);
            settings.extend(decorators.map(|list| (WRAP_LIST.to_owned(), list)));
            let mut section = toml::Table::new();
            section.insert(slot.key.to_owned(), entry.name.into());
            section.extend(settings);
            sections.push((slot.name.to_owned(), section));
        }
        let place = |name: &str| ORDER.iter().position(|known| *known == name);
        sections.sort_by_key(|(name, _)| place(name).unwrap_or(ORDER.len()));
        sections
    }

    /// Every key of the resolved run with its value, where it comes from and what it does.
    pub fn explain(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        if let Some(preset) = &self.preset {
            let slot = crate::registry::SlotInfo::of::<slots::Preset>();
            rows.push(Row {
                key: slot.name.to_owned(),
                value: toml::Value::from(preset.as_str()).to_string(),
                source: self.preset_source.clone(),
                help: slot.help.to_owned(),
            });
        }
        for (section, table) in self.resolved() {
            let entry = self.stages.iter().find(|(slot, _)| slot.name == section);
            let schema = match entry {
                Some((_, entry)) => entry.schema(),
                None => fixed_schema(&section),
            };
            let mut path = vec![section];
            for (key, value) in table {
                path.push(key);
                self.rows(&mut rows, &mut path, &value, &schema);
                path.pop();
            }
        }
        for row in &mut rows {
            let decorators = self.stages.iter().find(|(slot, _)| {
                slot.wrap.is_some() && row.key.strip_prefix(slot.name) == Some(&format!(".{WRAP_LIST}"))
            });
            if let Some((slot, entry)) = decorators {
                row.help = format!("what goes around {} `{}`, from the inside out", slot.name, entry.name);
            }
            if let Some((slot, entry)) = self.stages.iter().find(|(slot, _)| {
                row.key.strip_prefix(slot.name).and_then(|rest| rest.strip_prefix('.')) == Some(slot.key)
            }) {
                row.help = format!("{}: {}", slot.help, entry.help);
            }
        }
        rows
    }

    fn rows(&self, rows: &mut Vec<Row>, path: &mut Vec<String>, value: &toml::Value, schema: &Schema) {
        if let toml::Value::Table(table) = value
            && !table.is_empty()
        {
            for (key, value) in table {
                path.push(key.clone());
                self.rows(rows, path, value, schema);
                path.pop();
            }
            return;
        }
        let keys: Vec<&str> = path.iter().skip(1).map(String::as_str).collect();
        let steps: Vec<Step> = path.iter().cloned().map(Step::Key).collect();
        rows.push(Row {
            key: path.join("."),
            value: value.to_string(),
            source: self.origin(&steps),
            help: schema::help(schema, &keys),
        });
    }
}

/// The entry's defaults for what is not given, unless they and what is given exclude each other.
fn fill_defaults(entry: &Description, settings: &mut toml::Table) {
    let mut filled = settings.clone();
    schema::fill(&mut filled, &entry.schema());
    if entry.check(filled.clone()).is_ok() {
        *settings = filled;
    }
}

fn table<T: Serialize>(section: &T) -> toml::Table {
    toml::Table::try_from(section).unwrap_or_default()
}

fn fixed_schema(section: &str) -> Schema {
    match section {
        "run" => schema_for!(RunSection),
        "device" => schema_for!(DeviceSection),
        "host" => schema_for!(HostSection),
        "reduce" => schema_for!(ReduceSection),
        _ => schema_for!(LogSection),
    }
}
