use super::*;

/// Asserts that a rule finds nothing in the workspace.
fn holds(rule: Rule) {
    let tree = Tree::of_workspace().unwrap();
    assert!(tree.file("Cargo.toml").is_some(), "the workspace is not where it was expected");
    let problems: Vec<String> = rule(tree).iter().map(Problem::to_string).collect();
    assert!(problems.is_empty(), "\n{}\n", problems.join("\n"));
}

#[test]
fn systems_import_only_what_the_design_allows() {
    holds(imports::systems);
}

#[test]
fn every_unsafe_trait_mover_of_bytes_and_writer_of_files_has_a_test_or_a_reason() {
    holds(listed::tested);
}

#[test]
fn no_file_has_too_many_lines_of_code() {
    holds(size::lines_of_code);
}

#[test]
fn no_line_is_too_wide() {
    holds(size::line_width);
}

#[test]
fn unsafe_code_stands_only_where_the_design_has_it() {
    holds(unsafety::placement);
}

#[test]
fn no_unfinished_code_is_left() {
    holds(words::leftovers);
}

#[test]
fn comments_tell_no_plans() {
    holds(words::plans);
}

#[test]
fn no_file_names_a_path_of_one_machine() {
    holds(words::machine_paths);
}

#[test]
fn every_module_s_first_sentence_has_a_subject() {
    holds(words::headless);
}

#[test]
fn every_error_says_its_cause() {
    holds(errors::causes);
}

#[test]
fn every_public_enum_of_errors_can_grow() {
    holds(errors::growth);
}

#[test]
fn the_front_page_is_short() {
    holds(documents::front_page);
}

#[test]
fn examples_hide_nothing() {
    holds(documents::hidden_lines);
}

#[test]
fn every_dependency_has_its_reason_in_the_architecture() {
    holds(documents::dependencies);
}

#[test]
fn the_glossary_is_short_sorted_and_without_repetition() {
    holds(documents::glossary);
}

#[test]
fn every_crate_takes_the_workspace_lints() {
    holds(manifests::lints);
}

#[test]
fn the_product_stands_on_nothing_of_the_tests() {
    holds(manifests::product);
}

#[test]
fn no_two_public_types_have_one_name() {
    holds(names::duplicates);
}

#[test]
fn every_word_of_a_public_type_is_plain_or_explained() {
    holds(names::words);
}

#[test]
fn every_link_of_the_documents_leads_to_a_file() {
    holds(documents::links);
}
