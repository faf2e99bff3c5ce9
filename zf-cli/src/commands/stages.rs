//! `zf stages`: what is registered, and one entry's help, example and settings.

use std::io::Write;

use serde_json::{Value, json};
use zf_core::registry::schema::{Setting, settings};
use zf_core::registry::{Description, Registry, Slot, SlotInfo};
use zf_core::slots;

/// Lists all stages, those of one slot, or shows one stage.
///
/// # Errors
/// An unknown slot or name, with the nearest; a stage that is registered twice; an output that cannot be written.
pub fn run(slot: Option<&str>, name: Option<&str>, as_json: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    show(Registry::global()?, slot, name, as_json, out)
}

/// The same for any registry.
///
/// # Errors
/// As [`run`].
pub fn show(
    registry: &Registry,
    slot: Option<&str>,
    name: Option<&str>,
    as_json: bool,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    if let (Some(slot), Some(name)) = (slot, name) {
        let entry = registry.get(slot, name)?;
        if as_json {
            writeln!(out, "{:#}", as_value(entry))?;
            return Ok(());
        }
        return one(entry, out);
    }
    let wanted: Vec<SlotInfo> = match slot {
        Some(slot) => vec![registry.slot(slot)?],
        None => registry.slots(),
    };
    let of = |slot: &SlotInfo| registry.entries().iter().filter(|e| e.slot.name == slot.name).collect::<Vec<_>>();
    if as_json {
        let all: Vec<Value> = wanted.iter().flat_map(of).map(as_value).collect();
        writeln!(out, "{:#}", Value::Array(all))?;
        return Ok(());
    }
    for (index, slot) in wanted.iter().enumerate() {
        if index > 0 {
            writeln!(out)?;
        }
        list(slot, &of(slot), out)?;
    }
    if slot.is_none() {
        writeln!(out, "\n`zf stages SLOT NAME` shows one of them with its settings and an example")?;
    }
    Ok(())
}

/// A slot's heading and a line for each of its stages.
fn list(slot: &SlotInfo, entries: &[&Description], out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(out, "{}: {}", slot.name, slot.help)?;
    if entries.is_empty() {
        writeln!(out, "  none is registered")?;
    }
    let width = entries.iter().map(|entry| entry.name.len()).max().unwrap_or(0);
    for entry in entries {
        let default = if slot.default == Some(entry.name) { ", default" } else { "" };
        writeln!(out, "  {:width$}  {} ({}{default})", entry.name, entry.help, entry.krate)?;
    }
    Ok(())
}

fn one(entry: &Description, out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(out, "{} `{}`: {}", entry.slot.name, entry.name, entry.help)?;
    writeln!(out, "registered by {} at {}\n", entry.krate, entry.place)?;
    writeln!(out, "{}\n", example(entry))?;
    if is_preset(entry) {
        return Ok(());
    }
    let settings = settings(&entry.schema());
    if settings.is_empty() {
        writeln!(out, "It has no settings")?;
        return Ok(());
    }
    let width = settings.iter().map(|setting| setting.key.len()).max().unwrap_or(0);
    writeln!(out, "Settings:")?;
    for setting in &settings {
        writeln!(out, "  {:width$}  {}", setting.key, facts(setting))?;
        if !setting.help.is_empty() {
            writeln!(out, "  {:width$}  {}", "", setting.help)?;
        }
    }
    Ok(())
}

/// `number, default 0.1`.
fn facts(setting: &Setting) -> String {
    match (&setting.default, setting.required) {
        (Some(default), _) => format!("{}, default {default}", setting.holds),
        (None, true) => format!("{}, required", setting.holds),
        (None, false) => format!("{}, optional", setting.holds),
    }
}

/// The example as it stands in a run file, with the section and the key that names the stage.
fn example(entry: &Description) -> String {
    let text = entry.example.trim();
    if is_preset(entry) {
        return format!("preset = \"{}\"\n\nstands for\n\n{text}", entry.name);
    }
    let mut lines = String::new();
    if !text.starts_with('[') {
        lines.push_str(&format!("[{}]\n", entry.slot.name));
        let key = entry.slot.key;
        let named = |line: &str| line.split_once('=').is_some_and(|(left, _)| left.trim() == key);
        if !text.lines().any(named) {
            lines.push_str(&format!("{key} = \"{}\"\n", entry.name));
        }
    }
    lines + text
}

fn is_preset(entry: &Description) -> bool {
    entry.slot.name == <slots::Preset as Slot>::NAME
}

fn as_value(entry: &Description) -> Value {
    json!({
        "slot": entry.slot.name,
        "name": entry.name,
        "default": entry.slot.default == Some(entry.name),
        "help": entry.help,
        "crate": entry.krate,
        "file": entry.place.file,
        "line": entry.place.line,
        "example": example(entry),
        "settings": settings(&entry.schema()),
        "schema": entry.schema(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(slot: Option<&str>, name: Option<&str>, as_json: bool) -> String {
        let mut out = Vec::new();
        run(slot, name, as_json, &mut out).expect("registered");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn every_slot_is_listed_with_the_stages_that_are_built_in() {
        let all = text(None, None, false);
        for slot in slots::ALL {
            assert!(all.contains(&format!("{}: {}", slot.name, slot.help)), "{} is not in\n{all}", slot.name);
        }
        for name in ["adamw", "sgd", "cosine", "constant", "linear", "wsd", "zero", "threads", "text", "folder"] {
            assert!(all.contains(&format!("\n  {name} ")), "{name} is not in\n{all}");
        }
        assert!(all.contains("(zf-optim, default)"), "{all}");
    }

    #[test]
    fn one_stage_shows_settings_and_an_example() {
        let cosine = text(Some("schedule"), Some("cosine"), false);
        assert!(cosine.contains("[schedule]\nkind = \"cosine\"\nwarmup = 20\n"), "{cosine}");
        assert!(cosine.contains("  min_ratio  number, default "), "{cosine}");
        let preset = text(Some("preset"), Some("zero-1"), false);
        assert!(preset.contains("preset = \"zero-1\"\n\nstands for\n\n[partition]"), "{preset}");
    }

    #[test]
    fn json_holds_schema_and_settings() {
        let entry: Value = serde_json::from_str(&text(Some("optim"), Some("adamw"), true)).expect("JSON");
        assert_eq!(entry["crate"], "zf-optim");
        assert_eq!(entry["default"], true);
        assert!(entry["schema"]["properties"]["lr"].is_object(), "{entry:#}");
        let all: Value = serde_json::from_str(&text(Some("optim"), None, true)).expect("JSON");
        assert_eq!(all.as_array().map(Vec::len), Some(5));
    }

    /// Every example is what it claims to be: a section that the stage accepts.
    #[test]
    fn every_example_is_accepted() {
        for entry in Registry::global().expect("no duplicates").entries() {
            let text = if is_preset(entry) { format!("preset = \"{}\"\n", entry.name) } else { example(entry) };
            let needed =
                [("model", "path = \"m\""), ("data", "path = \"d.txt\"\nsequence_length = 8"), ("run", "steps = 1")];
            let others = needed.iter().filter(|(section, _)| *section != entry.slot.name);
            let others: String = others.map(|(section, keys)| format!("[{section}]\n{keys}\n")).collect();
            let text = format!("{text}\n{others}");
            if let Err(error) = zf_core::config::Run::from_toml_str(&text, "example") {
                panic!("the example of {} `{}` is refused: {error}", entry.slot.name, entry.name);
            }
        }
    }

    #[test]
    fn unknown_names_say_what_there_is() {
        let error = run(Some("schedule"), Some("cosin"), false, &mut Vec::new()).expect_err("unknown").to_string();
        assert!(
            error.starts_with("unknown schedule stage `cosin`: did you mean `cosine`? registered are: "),
            "{error}"
        );
        let error = run(Some("schedules"), None, false, &mut Vec::new()).expect_err("unknown").to_string();
        assert!(error.starts_with("unknown slot `schedules`, did you mean `schedule`?"), "{error}");
    }
}
