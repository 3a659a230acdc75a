/** The view of the cluster: what `rayllm status` says, read anew while it is shown. */

import { call } from "./api.js";
import { $, make, number } from "./dom.js";

const REFRESH_MS = 2000; // members report as often

export class ClusterView {
  #timer = 0;

  /** Show it from now on, or no more. */
  show(shown) {
    $("cluster").hidden = !shown;
    clearTimeout(this.#timer);
    if (shown) this.#refresh();
  }

  async #refresh() {
    clearTimeout(this.#timer);
    try {
      const status = await (await call("cluster?format=json")).json();
      $("cluster-body").replaceChildren(...sections(status));
      $("cluster-note").textContent = `As of ${new Date().toLocaleTimeString()}. Read again every ${REFRESH_MS / 1000} s.`;
    } catch (error) {
      $("cluster-note").textContent = `Not known now: ${error.title ? `${error.title}: ` : ""}${error.message}`;
    }
    clearTimeout(this.#timer);
    if (!$("cluster").hidden) this.#timer = setTimeout(() => (document.hidden ? this.#later() : this.#refresh()), REFRESH_MS);
  }

  #later() { this.#timer = setTimeout(() => this.#refresh(), REFRESH_MS); }
}

function sections({ hosts, applications }) {
  const place = new Map(hosts.map((host) => [host.node_id, host.address]));
  const where = ({ node_id }) => place.get(node_id) ?? `node ${node_id.slice(0, 12)}`;
  const alive = hosts.filter((host) => host.alive);
  const engines = applications.flatMap((app) => app.engines), servers = applications.flatMap((app) => app.servers);
  const sum = (list, value) => list.reduce((total, each) => total + value(each), 0);
  const tiles = make("dl", "tiles");
  for (const [name, value] of [
    ["Hosts", alive.length], ["GPUs", sum(alive, (host) => host.gpus)], ["CPUs", sum(alive, (host) => host.cpus)],
    ["Replicas", engines.length], ["API servers", servers.length],
    ["Live completions", sum(engines, ({ load }) => load.completions)], ["Tokens queued", sum(engines, ({ load }) => load.queued_tokens)],
  ]) {
    const tile = make("div", "figure");
    tile.append(make("dt", "", name), make("dd", "", number(value)));
    tiles.append(tile);
  }
  const parts = [tiles, section("Hosts", table(
    ["Host", "State", "CPUs", "GPUs"],
    [...hosts].sort((one, other) => other.alive - one.alive || one.address.localeCompare(other.address)).map((host) => [host.address, hostState(host), number(host.cpus), number(host.gpus)]),
  ))];
  for (const app of applications) parts.push(...application(app, where, applications.length > 1));
  return parts;
}

function application(app, where, isNamed) {
  const suffix = isNamed ? ` of ${app.name}` : "";
  if (!app.answers) {
    return [section(`Application ${app.name}`, make("p", "note", "Its directory does not answer; it comes back on another host if its own is lost."))];
  }
  const replicas = table(
    ["Replica", "State", "Host", "Live", "Tokens queued", "Workers replaced", "Ranks", "Process", "Version"],
    app.engines.map((report) => [
      `${report.member.model} ${report.member.index}`, memberState(report), where(report.member), number(report.load.completions),
      number(report.load.queued_tokens), report.num_recoveries ? `${report.num_recoveries} × (${number(report.recovery_seconds)} s)` : "0",
      report.ranks.map((rank, index) => `${index}: ${rank}`).join("\n"), String(report.pid), report.version,
    ]),
  );
  const servers = table(
    ["API server", "State", "Host", "Models", "Live", "Process", "Version"],
    app.servers.map((report) => [
      report.member.address || "behind Serve", memberState(report), where(report.member), report.member.models.join(", "),
      number(report.load.completions), String(report.pid), report.version,
    ]),
  );
  const parts = [section(`Replicas${suffix}`, replicas), section(`API servers${suffix}`, servers)];
  if (app.incidents.length) {
    const rows = app.incidents.toReversed().map(({ at, member, seconds }) => [
      new Date(at * 1000).toLocaleString(), member.type === "EngineMember" ? `${member.model} ${member.index}` : `API server ${member.address}`,
      where(member), seconds === null ? "lost" : `workers replaced in ${seconds.toFixed(2)} s`,
    ]);
    parts.push(section(`Last recoveries${suffix}`, table(["When", "What", "Host", "How"], rows)));
  }
  return parts;
}

function hostState({ alive, draining, leaves_in: seconds }) {
  if (!alive) return badge("lost", "bad");
  if (draining) return badge(seconds === null ? "drains" : `drains, goes in ${Math.max(0, seconds).toFixed(0)} s`, "warn");
  return badge("alive", "good");
}

function memberState({ member, stop_in: seconds }) {
  if (seconds !== null) return badge(`drains, ends within ${seconds.toFixed(0)} s`, "warn");
  return member.draining ? badge("drains", "warn") : badge("serves", "good");
}

function badge(text, kind) { return make("span", `badge ${kind}`, text); }

function section(title, content) {
  const node = make("section");
  node.append(make("h2", "", title), content);
  return node;
}

function table(heads, rows) {
  const box = make("div", "table"), node = make("table"), head = make("tr"), body = make("tbody");
  box.tabIndex = 0; // it scrolls
  head.append(...heads.map((text) => Object.assign(make("th", "", text), { scope: "col" })));
  body.append(...rows.map((cells) => {
    const row = make("tr");
    row.append(...cells.map((cell) => {
      const data = make("td");
      data.append(cell);
      return data;
    }));
    return row;
  }));
  const top = make("thead");
  top.append(head);
  node.append(top, body);
  box.append(node);
  return rows.length ? box : make("p", "note", "None.");
}
