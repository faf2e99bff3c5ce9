//! `zf explain`: a run file resolved, every key with its value, where it comes from and what it does.

use std::io::Write;
use std::path::Path;

use zf_core::Error;
use zf_core::config::{self, Row};
use zf_core::registry::Registry;

/// Widest column before the text beside it moves to the right.
const MAX_COLUMN: usize = 48;

/// Explains a run file with the overrides of the command line.
///
/// # Errors
/// A run file that is wrong (file, line, caret), a DeepSpeed configuration, an output that cannot be written.
pub fn run(file: &Path, overrides: &[String], out: &mut dyn Write) -> anyhow::Result<()> {
    if is_json(file) {
        return Err(Error::Config(format!(
            "{}: this is JSON; DeepSpeed configurations are not in this version, give a run file (TOML)",
            file.display()
        ))
        .into());
    }
    let run = config::load(Some(file), overrides, Registry::global()?)?;
    let rows = run.explain();
    let setting = |row: &Row| format!("{} = {}", inner(row), row.value);
    let width = |text: &dyn Fn(&Row) -> String| {
        rows.iter().map(|row| text(row).chars().count()).filter(|width| *width <= MAX_COLUMN).max().unwrap_or(0)
    };
    let (first, second) = (width(&setting), width(&|row| row.source.clone()));
    let given = rows.iter().filter(|row| row.source != "default").count();
    writeln!(out, "{}: {} keys, {given} of them given", file.display(), rows.len())?;
    let mut section = "";
    for row in &rows {
        let own = row.key.split_once('.').map_or("", |(section, _)| section);
        if own != section {
            writeln!(out, "\n[{own}]")?;
            section = own;
        }
        let line = format!("{:first$}  {:second$}  {}", setting(row), row.source, row.help);
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

/// The key without its section.
fn inner(row: &Row) -> &str {
    row.key.split_once('.').map_or(row.key.as_str(), |(_, key)| key)
}

/// Whether the file is JSON, by its name or by how it begins; no run file begins with a brace.
fn is_json(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"))
        || std::fs::read(file).is_ok_and(|bytes| bytes.trim_ascii_start().starts_with(b"{"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explain(name: &str, text: &str, overrides: &[String]) -> anyhow::Result<String> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join(name);
        std::fs::write(&file, text)?;
        let mut out = Vec::new();
        run(&file, overrides, &mut out)?;
        Ok(String::from_utf8(out)?.replace(&format!("{}", folder.path().display()), "DIR"))
    }

    const RUN: &str =
        "preset = 'zero-1'\n[model]\npath = 'm'\n[data]\npath = 't.txt'\nsequence_length = 8\n[run]\nsteps = 3\n";

    #[test]
    fn every_key_has_value_source_and_help() {
        let text = explain("a.toml", RUN, &["optim.lr=0.5".to_owned()]).expect("valid");
        let line = |start: &str| {
            let found = text.lines().find(|line| line.starts_with(start));
            found.unwrap_or_else(|| panic!("{start} is not in\n{text}")).to_owned()
        };
        assert!(line("steps = 3 ").contains("DIR/a.toml:8"), "{text}");
        assert!(line("stage = 1 ").contains("preset zero-1"), "{text}");
        assert!(line("lr = 0.5 ").contains("-o optim.lr=0.5"), "{text}");
        assert!(line("lr = 0.5 ").ends_with("Learning rate, before the schedule."), "{text}");
        assert!(line("clip = 1.0 ").contains(" default "), "{text}");
        assert!(line("sequence_length = 8 ").contains("Tokens of a sequence"), "{text}");
        assert!(text.contains("\n[schedule]\nkind = \"constant\""), "{text}");
    }

    #[test]
    fn deepspeed_configurations_are_named() {
        for name in ["ds_config.json", "ds_config"] {
            let error = explain(name, " {\"zero_optimization\": {\"stage\": 2}}", &[]).expect_err("JSON");
            assert!(error.to_string().contains("DeepSpeed configurations are not in this version"), "{error}");
        }
    }

    #[test]
    fn wrong_files_show_the_line() {
        let error = explain("a.toml", "[run]\nstep = 3", &[]).expect_err("wrong").to_string();
        assert!(error.contains("a.toml:2:1: unknown key `step` in [run]\n   2 | step = 3\n     | ^^^^ "), "{error}");
    }
}
