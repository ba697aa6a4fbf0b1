"""Style and script of the status page, which its policy allows by their hashes."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root{color-scheme:light dark;--paper:#f6f7f9;--card:#fff;--ink:#1b2430;--soft:#5b6775;
--line:#dfe4ea;--room:#e6eaef;--used:#2f6fde;--taken:#9dbcf0;--full:#c9580a;
--good:#18794e;--goodback:#dcf3e7;--warn:#9a5200;--warnback:#fbeed8;--bad:#b3261e;
--badback:#fbe3e1}
@media (prefers-color-scheme:dark){:root{--paper:#12161c;--card:#1a2029;--ink:#e4e9f0;
--soft:#97a3b2;--line:#2b3440;--room:#2b3440;--used:#6ea0f5;--taken:#3b5a93;
--full:#f0a050;--good:#6fd3a2;--goodback:#153528;--warn:#f0b866;--warnback:#3a2b12;
--bad:#ff9d94;--badback:#431d1b}}
*{box-sizing:border-box}[hidden]{display:none!important}
body{margin:0 auto;max-width:108rem;padding:1rem;background:var(--paper);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
header{display:flex;flex-wrap:wrap;align-items:baseline;gap:.5rem .75rem;
margin-bottom:1rem}
form{margin-left:auto}
input{font:inherit;font-size:.875rem;padding:.25rem .6rem;width:14rem;max-width:100%;
color:var(--ink);background:var(--card);border:1px solid var(--line);border-radius:8px}
#live{display:grid;gap:1rem;grid-template-columns:minmax(0,1fr)}
@media (min-width:100rem){#live{grid-template-columns:minmax(0,1fr) 24rem}}
h1{font-size:1.35rem;margin:0}h2{font-size:1rem;margin:0 0 .6rem}
header p{margin:0;color:var(--soft)}
#link{font-size:.85rem}
#link:before{content:"";display:inline-block;width:.6em;height:.6em;border-radius:50%;
margin-right:.45em;background:var(--soft)}
#link.on{color:var(--good)}#link.on:before{background:var(--good)}
#link.lost{color:var(--bad)}#link.lost:before{background:var(--bad)}
.totals{display:grid;grid-template-columns:repeat(auto-fit,minmax(8rem,1fr));gap:.6rem;
margin:0 0 1rem}
.totals div,section{background:var(--card);border:1px solid var(--line);
border-radius:10px}
.totals div{padding:.6rem .8rem}
.totals dt{color:var(--soft);font-size:.8rem}
.totals dd{margin:0;font-size:1.35rem;font-weight:600;font-variant-numeric:tabular-nums}
section{padding:.9rem 1rem;margin-bottom:1rem}
.bars{display:grid;grid-template-columns:repeat(auto-fit,minmax(16rem,1fr));
gap:.9rem 1.5rem}
.quota p{display:flex;justify-content:space-between;gap:1rem;margin:0 0 .3rem;
font-size:.9rem}
.quota span:last-child{color:var(--soft)}.quota b{color:var(--ink)}
.bar{display:block;width:100%;height:.55rem;border-radius:.3rem}
.room{fill:var(--room)}.used{fill:var(--used)}.taken{fill:var(--taken)}
.full{fill:var(--full)}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.875rem;
font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.4rem .6rem;border-bottom:1px solid var(--line);
vertical-align:top}
th{color:var(--soft);font-weight:500;white-space:nowrap}
th a{color:inherit;text-decoration:none}th a:hover{text-decoration:underline}
th[aria-sort]{color:var(--ink)}
th[aria-sort] a:after{content:" \\25B4"}
th[aria-sort=descending] a:after{content:" \\25BE"}
tbody tr:last-child td{border-bottom:0}
td{white-space:nowrap}
td.long{white-space:normal;overflow-wrap:anywhere;min-width:13rem}
.number{text-align:right}
td .bar{height:.25rem;margin-top:.2rem;min-width:4.5rem}
small,.none{color:var(--soft)}td small{display:block}.none{margin:.3rem 0 0}
code{font:.85em ui-monospace,SFMono-Regular,Menlo,monospace}
.state{padding:.05rem .5rem;border-radius:1rem;font-size:.8rem;
background:var(--room);color:var(--soft)}
.running{background:var(--goodback);color:var(--good)}
.stopping,.doomed,.reaping,.starting{background:var(--warnback);color:var(--warn)}
.given-up{background:var(--badback);color:var(--bad)}
.backing-off,.waiting{background:var(--warnback);color:var(--warn)}
.error,.grave b{color:var(--bad)}
.events{list-style:none;margin:0;padding:0;font-size:.85rem;
font-variant-numeric:tabular-nums}
.events li{padding:.2rem 0;overflow-wrap:anywhere;color:var(--soft)}
.events b{color:var(--ink);font-weight:600}.events .grave b{color:var(--bad)}
@media (max-width:44rem){
body{padding:.6rem}section{padding:.75rem}
.totals{grid-template-columns:repeat(2,minmax(0,1fr))}
.bars{grid-template-columns:minmax(0,1fr)}
thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
table,tbody,tr,td{display:block}
tbody tr{padding:.5rem 0;border-bottom:1px solid var(--line)}
tbody tr:last-child{border-bottom:0}
td,td.long{min-width:0}
td,td.long{display:grid;grid-template-columns:7rem minmax(0,1fr);gap:.5rem;
border:0;padding:.15rem 0;text-align:left;white-space:normal;overflow-wrap:anywhere}
td:before{content:attr(data-head);color:var(--soft)}
}
"""

SCRIPT: Final = """
const live=document.getElementById("live"),link=document.getElementById("link");
const box=document.getElementById("filter"),form=box.form;
const asked=new URLSearchParams(location.search);
let html=live.innerHTML,sort=asked.get("sort")||"";
const say=(state,text)=>{link.className=state;link.textContent=text};
const value=(row,at)=>row.cells[at].dataset.value??row.cells[at].textContent;
const compare=(one,other)=>one===""?1:other===""?-1:
isNaN(one)||isNaN(other)?one.localeCompare(other):one-other;
const arrange=()=>{
const key=sort.replace(/^-/,""),way=sort[0]==="-"?-1:1,words=box.value.toLowerCase();
for(const table of live.querySelectorAll("table")){
const heads=[...table.tHead.rows[0].cells],body=table.tBodies[0];
const at=heads.findIndex(head=>head.dataset.sort===key);
for(const head of heads)head.removeAttribute("aria-sort");
if(at>=0){
heads[at].setAttribute("aria-sort",way<0?"descending":"ascending");
body.append(...[...body.rows].sort((one,other)=>{
const a=value(one,at),b=value(other,at);
return a===""||b===""?compare(a,b):way*compare(a,b)}))}
for(const row of body.rows)row.hidden=!row.textContent.toLowerCase().includes(words)}};
const draw=()=>{live.innerHTML=html;arrange()};
const keep=()=>{form.elements.sort.value=sort;
history.replaceState(null,"","?"+new URLSearchParams({sort,filter:box.value}))};
live.addEventListener("click",event=>{
const head=event.target.closest("th");
if(!head)return;
event.preventDefault();
const key=head.dataset.sort,ways=head.className==="number"?["-"+key,key]:[key,"-"+key];
sort=ways[ways.indexOf(sort)+1]||"";
keep();draw()});
box.addEventListener("input",()=>{keep();draw()});
form.addEventListener("submit",event=>event.preventDefault());
const source=new EventSource("/events");
source.onopen=()=>say("on","live");
source.onerror=()=>say("lost","host not reached");
source.addEventListener("state",event=>{html=event.data;draw()});
"""
