//! Names of cases: values as short texts, and names as names of folders.

/// The longest text of a value in a case's name.
const LONGEST: usize = 40;

/// The name of a case as that of a folder: letters, digits and `.,=+_-` stay, everything else becomes `-`, and so does a
/// dot in front.
pub fn folder_name(name: &str) -> String {
    let keep = |(at, c): (usize, char)| match c {
        '.' if at == 0 => '-',
        c if c.is_ascii_alphanumeric() || ".,=+_-".contains(c) => c,
        _ => '-',
    };
    name.chars().enumerate().map(keep).collect()
}

/// The texts of a list's values: as they are, or by number (`#2`) where that would be long.
pub(super) fn labels(values: &[toml::Value]) -> Vec<String> {
    let numbered = values.iter().enumerate().map(|(at, value)| match text(value) {
        text if text.is_empty() || text.chars().count() > LONGEST => format!("#{}", at + 1),
        text => text,
    });
    numbered.collect()
}

fn text(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join(","),
        toml::Value::Table(table) => {
            table.iter().map(|(key, value)| format!("{key}={}", text(value))).collect::<Vec<_>>().join(",")
        }
        plain => plain.to_string(),
    }
}
