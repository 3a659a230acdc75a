/** The form of a conversation's settings. Empty fields leave the choice to the server. */

import { extraOf, PARAMS, toolsOf } from "./conversation.js";
import { $ } from "./dom.js";

const EXAMPLE = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather at a place now.",
    parameters: { type: "object", properties: { place: { type: "string", description: "City and country" } }, required: ["place"] },
  },
}];
const JSON_FIELDS = { tools: toolsOf, extra: extraOf };

export class SettingsForm {
  #settings = null;

  /** onchange: called after each change of the settings that are shown. */
  constructor(onchange) {
    this.onchange = onchange;
    $("settings").onsubmit = (event) => event.preventDefault();
    $("settings").oninput = () => this.#take();
    $("tools-example").onclick = () => {
      $("tools").value = JSON.stringify(EXAMPLE, null, 2);
      this.#take();
    };
  }

  show(settings) {
    this.#settings = settings;
    for (const name of ["system", "tools", "tool_choice", "extra"]) $(name).value = settings[name];
    for (const name of PARAMS) $(name).value = settings.params[name] ?? "";
    $("tools-part").open ||= Boolean(settings.tools);
    $("extra-part").open ||= Boolean(settings.extra);
    this.#check();
  }

  /** Whether all fields are valid; if not, the first that is not says why. The form must be visible for that. */
  report() {
    for (const name of Object.keys(JSON_FIELDS)) if (!$(name).validity.valid) $(`${name}-part`).open = true;
    return $("settings").reportValidity();
  }

  get isValid() { return $("settings").checkValidity(); }

  #take() {
    for (const name of ["system", "tools", "tool_choice", "extra"]) this.#settings[name] = $(name).value;
    const given = PARAMS.filter((name) => $(name).value !== "");
    this.#settings.params = Object.fromEntries(given.map((name) => [name, Number($(name).value)]));
    this.#check();
    this.onchange();
  }

  #check() {
    for (const [name, read] of Object.entries(JSON_FIELDS)) {
      let problem = "";
      try { read($(name).value); } catch (error) { problem = `Not valid: ${error.message}`; }
      $(name).setCustomValidity(problem);
    }
  }
}
