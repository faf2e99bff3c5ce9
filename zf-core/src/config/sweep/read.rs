//! The section `[sweep]` as it stands in the file.

use super::Expect;
use super::label::{folder_name, labels};
use crate::Result;
use crate::config::load::Loader;
use crate::config::source::Mark;
use crate::config::tree::{Body, MAX_DEPTH, Node, Tree};
use crate::registry::nearest;

/// More runs than this are a typing error: they would take weeks.
pub(super) const MAX_RUNS: usize = 1000;

/// Keys of `[sweep]` that are no lists of values.
const OWN: [&str; 4] = ["seeds", "baseline", "expect", "case"];

/// The longest name: with lists and seed it becomes the name of a folder.
const LONGEST: usize = 64;

/// The longest name of a folder that is made of a case and its seed.
const LONGEST_FOLDER: usize = 200;

/// The whole section.
pub(super) struct Section {
    pub(super) axes: Vec<Axis>,
    pub(super) named: Vec<Named>,
    pub(super) seeds: Vec<(u64, Mark)>,
    pub(super) baseline: Option<(String, Mark)>,
    pub(super) expect: Option<Expect>,
    pub(super) mark: Mark,
}

/// A list of values of one key.
pub(super) struct Axis {
    pub(super) path: Vec<String>,
    pub(super) key: Mark,
    pub(super) values: Vec<Node>,
    pub(super) labels: Vec<String>,
}

/// A `[[sweep.case]]`.
pub(super) struct Named {
    pub(super) name: String,
    pub(super) expect: Option<(Expect, Mark)>,
    pub(super) layer: Tree,
}

/// Reads the section.
pub(super) fn section(node: &Node, loader: &Loader<'_>) -> Result<Section> {
    let Some(table) = node.table() else {
        return Err(loader.fail(&node.value, &format!("expected a section [sweep], found {}", kind(node)), ""));
    };
    let mut section = Section {
        axes: Vec::new(),
        named: Vec::new(),
        seeds: Vec::new(),
        baseline: None,
        expect: None,
        mark: node.key.clone(),
    };
    for (key, node) in &table.0 {
        match key.as_str() {
            "seeds" => section.seeds = seeds(node, loader)?,
            "baseline" => {
                let name = node.text().ok_or_else(|| wrong(node, "`baseline`", "the name of a case", loader))?;
                section.baseline = Some((name.to_owned(), node.value.clone()));
            }
            "expect" => section.expect = Some(expect(node, loader)?),
            "case" => section.named = cases(node, loader)?,
            _ => axes(&mut section.axes, &[], key, node, loader)?,
        }
    }
    let longest = |texts: &mut dyn Iterator<Item = usize>| texts.max().unwrap_or(0);
    let lists = section.axes.iter().map(|axis| {
        axis.path.iter().map(|part| part.len() + 1).sum::<usize>() + longest(&mut axis.labels.iter().map(String::len))
    });
    if lists.sum::<usize>() + longest(&mut section.named.iter().map(|named| named.name.len())) > LONGEST_FOLDER {
        let message = "[sweep] has so many lists that the names of its cases are too long for folders";
        return Err(loader.fail(&section.mark, message, "use `[[sweep.case]]` with names instead"));
    }
    Ok(section)
}

/// Puts `node` at `path`, joining tables.
///
/// # Errors
/// The place of a key that is there already.
pub(super) fn insert(tree: &mut Tree, path: &[String], node: Node) -> Result<(), Mark> {
    let Some((first, rest)) = path.split_first() else { return Ok(()) };
    let Some((_, old)) = tree.0.iter_mut().find(|(key, _)| key == first) else {
        let nested = rest.iter().rev().fold(node, |node, key| Node {
            key: node.key.clone(),
            value: node.value.clone(),
            body: Body::Table(Tree(vec![(key.clone(), node)])),
        });
        tree.0.push((first.clone(), nested));
        return Ok(());
    };
    match (&mut old.body, node) {
        (Body::Table(below), node) if !rest.is_empty() => insert(below, rest, node),
        (Body::Table(below), Node { body: Body::Table(above), .. }) => {
            above.0.into_iter().try_for_each(|(key, node)| insert(below, &[key], node))
        }
        (_, node) => Err(node.key),
    }
}

/// The lists under one key of `[sweep]`, which may be a table of them (`[sweep.partition]`).
fn axes(axes: &mut Vec<Axis>, above: &[String], key: &str, node: &Node, loader: &Loader<'_>) -> Result<()> {
    let mut path = above.to_owned();
    path.extend(parts(key, node, loader)?);
    let shown = path.join(".");
    match &node.body {
        Body::Table(table) if !table.0.is_empty() => {
            return table.0.iter().try_for_each(|(key, node)| self::axes(axes, &path, key, node, loader));
        }
        Body::Array(values) if values.is_empty() => {
            return Err(loader.fail(
                &node.value,
                &format!("`{shown}` in [sweep]: an empty list"),
                "give a value or more",
            ));
        }
        Body::Array(values) => few(values, node, loader)?,
        _ => {
            let advice = match nearest(&shown, OWN) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("for example `\"{shown}\" = [{}]`", node.plain()),
            };
            let message = format!("`{shown}` in [sweep]: expected a list of values, found {}", kind(node));
            return Err(loader.fail(&node.value, &message, &advice));
        }
    }
    if path.len() == 1 && shown != "preset" {
        let advice = match nearest(&shown, OWN) {
            Some(near) => format!("did you mean `{near}`?"),
            None => "lists are given for keys such as `\"partition.stage\"`".to_owned(),
        };
        return Err(loader.fail(&node.key, &format!("unknown key `{shown}` in [sweep]"), &advice));
    }
    if shown == "run.seed" {
        return Err(loader.fail(
            &node.key,
            "the seeds of a sweep are given by `seeds`",
            "for example `seeds = [1, 2]`",
        ));
    }
    let Body::Array(values) = &node.body else { return Ok(()) };
    let labels = labels(&values.iter().map(Node::plain).collect::<Vec<_>>());
    for (at, value) in values.iter().enumerate() {
        let folder = folder_name(&labels[at]);
        if labels[..at].iter().any(|earlier| folder_name(earlier) == folder) {
            let message = format!("`{shown}` in [sweep]: `{}` has the folder of an earlier value", labels[at]);
            return Err(loader.fail(&value.value, &message, "take it out, or use `[[sweep.case]]` with names"));
        }
    }
    if let Some(twice) = axes.iter().find(|axis| axis.path == path) {
        return Err(loader.fail(&node.key, &format!("`{}` has two lists", twice.path.join(".")), "join them"));
    }
    axes.push(Axis { path, key: node.key.clone(), values: values.clone(), labels });
    Ok(())
}

fn cases(node: &Node, loader: &Loader<'_>) -> Result<Vec<Named>> {
    let Body::Array(items) = &node.body else {
        return Err(wrong(node, "`case`", "cases, each under its own [[sweep.case]]", loader));
    };
    few(items, node, loader)?;
    let mut named: Vec<Named> = Vec::new();
    for item in items {
        let Some(table) = item.table() else {
            return Err(wrong(item, "`case`", "a table with a name and settings", loader));
        };
        let Some(name) = table.get("name") else {
            return Err(loader.fail(
                &item.key,
                "missing key `name` in [[sweep.case]]",
                "for example `name = \"small\"`",
            ));
        };
        let place = name.value.clone();
        let name = name.text().ok_or_else(|| wrong(name, "`name` in [[sweep.case]]", "a text", loader))?;
        if name.trim().is_empty() || name.chars().count() > LONGEST || name.chars().any(char::is_control) {
            let message = format!("a case's name has 1 to {LONGEST} printable characters, found {name:?}");
            return Err(loader.fail(&place, &message, ""));
        }
        if let Some(earlier) = named.iter().find(|earlier| folder_name(&earlier.name) == folder_name(name)) {
            let message = match &earlier.name {
                same if same == name => format!("two cases are called `{name}`"),
                other => format!("cases `{other}` and `{name}` would have one folder, `{}`", folder_name(name)),
            };
            return Err(loader.fail(&place, &message, "give one of them another name"));
        }
        let mut case = Named { name: name.to_owned(), expect: None, layer: Tree::default() };
        for (key, node) in table.0.iter().filter(|(key, _)| key != "name") {
            if key == "expect" {
                case.expect = Some((expect(node, loader)?, node.value.clone()));
                continue;
            }
            let path = parts(key, node, loader)?;
            insert(&mut case.layer, &path, node.clone()).map_err(|place| {
                loader.fail(&place, &format!("case `{name}` sets `{}` twice", path.join(".")), "take one of them out")
            })?;
        }
        named.push(case);
    }
    Ok(named)
}

/// The parts of a dotted key.
fn parts(key: &str, node: &Node, loader: &Loader<'_>) -> Result<Vec<String>> {
    let parts: Vec<String> = key.split('.').map(|part| part.trim().to_owned()).collect();
    let message = if parts.iter().any(String::is_empty) {
        format!("expected a key such as `partition.stage`, found `{key}`")
    } else if parts.len() >= MAX_DEPTH {
        format!("the key is nested more than {MAX_DEPTH} deep")
    } else if ["extends", "sweep"].contains(&parts[0].as_str()) {
        format!("`{}` cannot be set by a sweep", parts[0])
    } else {
        return Ok(parts);
    };
    Err(loader.fail(&node.key, &message, ""))
}

fn seeds(node: &Node, loader: &Loader<'_>) -> Result<Vec<(u64, Mark)>> {
    let Body::Array(items) = &node.body else { return Err(wrong(node, "`seeds`", "a list such as [1, 2, 3]", loader)) };
    if items.is_empty() {
        return Err(loader.fail(
            &node.value,
            "`seeds` in [sweep]: an empty list",
            "take it out for the run file's seed",
        ));
    }
    few(items, node, loader)?;
    let mut seeds: Vec<(u64, Mark)> = Vec::new();
    for item in items {
        let seed = item.plain().as_integer().and_then(|seed| u64::try_from(seed).ok());
        let seed = seed.ok_or_else(|| wrong(item, "`seeds`", "whole numbers, 0 or more", loader))?;
        if seeds.iter().any(|(earlier, _)| *earlier == seed) {
            return Err(loader.fail(&item.value, &format!("`seeds` in [sweep]: {seed} is there twice"), ""));
        }
        seeds.push((seed, item.value.clone()));
    }
    Ok(seeds)
}

fn expect(node: &Node, loader: &Loader<'_>) -> Result<Expect> {
    let wanted = "\"equal\", \"different\" or { tolerance = 1e-3 }";
    match (node.text(), node.table()) {
        (Some("equal"), _) => return Ok(Expect::Equal),
        (Some("different"), _) => return Ok(Expect::Different),
        (_, Some(table)) if table.0.len() == 1 => {
            let Some(tolerance) = table.get("tolerance") else { return Err(wrong(node, "`expect`", wanted, loader)) };
            let number = match tolerance.plain() {
                toml::Value::Integer(number) => number as f64,
                toml::Value::Float(number) => number,
                _ => f64::NAN,
            };
            if number >= 0.0 && number.is_finite() {
                return Ok(Expect::Tolerance(number));
            }
            return Err(wrong(tolerance, "`tolerance`", "a finite number, 0 or more", loader));
        }
        _ => {}
    }
    Err(wrong(node, "`expect`", wanted, loader))
}

fn few(items: &[Node], node: &Node, loader: &Loader<'_>) -> Result<()> {
    if items.len() <= MAX_RUNS {
        return Ok(());
    }
    let message = format!("[sweep]: a list of {}, expected at most {MAX_RUNS}", items.len());
    Err(loader.fail(&node.key, &message, ""))
}

fn wrong(node: &Node, what: &str, wanted: &str, loader: &Loader<'_>) -> crate::Error {
    let found = match &node.body {
        Body::Leaf(value) => format!("{value}"),
        _ => kind(node).to_owned(),
    };
    loader.fail(&node.value, &format!("{what} in [sweep]: expected {wanted}, found {found}"), "")
}

fn kind(node: &Node) -> &'static str {
    node.plain().type_str()
}
